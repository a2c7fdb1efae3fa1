"""When rows travel: the numbers of exchanges, and how long an attention call takes with them.

**Exchanges.** An exchange is started at the beginning of a phase, and complete at its end or at the end of the next one.
Number 2 p belongs to phase p alone; number 2 p + 1 is started in phase p and complete at the end of phase p + 1. So
numbers ascend with starts and with ends, on all ranks, and a link that keeps the order serves what is needed first.
Rows straight from their owner that phase p needs have two phases' time: number 2 p - 3 (phase 1: number 0). Rows passed
on by a gateway, which has to have them, have one: 2 p - 2. Partial results made in phase p, the last that adds to them, leave
as number 2 p + 3 for their owner, or 2 p + 2 for a gateway, which adds its own and sends them on a phase later.
"""

from __future__ import annotations

from typing import NamedTuple

import numba as nb
import numpy as np

from hf_dcp.planning.batch import Topology
from hf_dcp.planning.tiles import Atoms
from hf_dcp.planning.uses import Uses
from hf_dcp.rates import Rates

INSIDE, BETWEEN, RELAYED = 1, 2, 3


def started_in(exchange: int) -> int:
    """The phase in which an exchange is started."""
    return exchange // 2


def completed_in(exchange: int) -> int:
    """The phase at whose end an exchange is complete."""
    return (exchange + 1) // 2


class Side(NamedTuple):
    """The uses of one side (Q or KV) as compiled functions want them; see `Uses`."""

    ptr: np.ndarray
    """int64[tiles + 1]"""
    atom: np.ndarray
    """int32[...]: the atoms of every tile."""
    num_atoms: int
    lookup: np.ndarray
    """int64[world_size * groups * atoms]: the use of (device, group, atom), or -1."""
    device: np.ndarray
    source: np.ndarray
    via: np.ndarray
    kind: np.ndarray
    """int8[uses]: `INSIDE`, `BETWEEN`: straight from the owner; `RELAYED`."""
    inputs: np.ndarray
    """int64[uses]: bytes towards the tiles."""
    partials: np.ndarray
    """int64[uses]: bytes of partial results; 0: there are none."""

    @classmethod
    def of(cls, uses: Uses, atoms: Atoms, topology: Topology) -> Side:
        """Of a pass that is still open: without bytes."""
        foreign = topology.node[uses.source] != topology.node[uses.device]
        kind = np.where(uses.via >= 0, RELAYED, np.where(foreign, BETWEEN, INSIDE)).astype(np.int8)
        nothing = np.zeros(0, np.int64)
        where = (uses.device, uses.source, uses.via, kind)
        return cls(atoms.tile_ptr, atoms.tile_atom, len(atoms.begin), uses.index, *where, nothing, nothing)

    def carrying(self, rows: np.ndarray, inputs: int, partials: int) -> Side:
        """The same with bytes per row."""
        return self._replace(inputs=rows * inputs, partials=rows * partials)


class Work(NamedTuple):
    """What the tiles of one pass take; all of one head group."""

    seconds: np.ndarray
    """float64[tiles]: of arithmetic."""
    q: np.ndarray
    """int32[tiles]: the Q block."""
    rows: np.ndarray
    """int64[tiles]: query rows."""
    row_s: float
    """Seconds for each query row of a division, once for all tiles of a Q block."""


class Links(NamedTuple):
    """Rates as compiled functions want them; entries by kind of row, 0 unused."""

    seconds: np.ndarray
    """float64[4]: per byte. A gateway's rows come over links between nodes, those of all gateways at once."""
    latency: np.ndarray
    """float64[4]"""
    launch: float
    call: float

    @classmethod
    def of(cls, rates: Rates, topology: Topology) -> Links:
        gateways = max(1, topology.world_size // topology.num_nodes)
        inside, between = 1 / rates.intra_bytes, 1 / rates.inter_bytes
        seconds = np.array([0.0, inside, between, inside + between / gateways])
        latency = np.array([0.0, rates.intra_latency_s, rates.latency_s, rates.latency_s + rates.intra_latency_s])
        return cls(seconds, latency, rates.launch_s, rates.call_s)


@nb.njit(cache=True)
def exchange_numbers(side: Side, device: np.ndarray, phase: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """In which exchange the rows of every use arrive, and in which their partial results leave.

    Args:
        device: int32[tiles, groups]
        phase: int32[units]

    Returns:
        int64[uses] each.
    """
    tiles, groups = device.shape
    first, last = np.full(len(side.device), 1 << 30), np.full(len(side.device), -1)
    for t in range(tiles):
        for g in range(groups):
            base, when = (device[t, g] * groups + g) * side.num_atoms, phase[t * groups + g]
            for p in range(side.ptr[t], side.ptr[t + 1]):
                use = side.lookup[base + side.atom[p]]
                if use >= 0:
                    first[use] = min(first[use], when)
                    last[use] = max(last[use], when)
    for use in range(len(first)):
        gateway = side.via[use]
        if gateway >= 0:
            first[gateway] = min(first[gateway], first[use] - 1)
            last[gateway] = max(last[gateway], last[use] + 1)
    arrive, leave = np.empty(len(first), np.int64), np.empty(len(first), np.int64)
    for use in range(len(first)):
        relayed = side.via[use] >= 0
        arrive[use] = 2 * first[use] - 2 if relayed else max(0, 2 * first[use] - 3)
        leave[use] = 2 * last[use] + 2 if relayed else 2 * last[use] + 3
    return arrive, leave


@nb.njit(cache=True)
def _count_bytes(side, numbers, traffic):
    arrive, leave = numbers
    for use in range(len(side.device)):
        traffic[arrive[use], 0, side.source[use], side.device[use]] += side.inputs[use]
        if side.partials[use] > 0:
            traffic[leave[use], 1, side.device[use], side.source[use]] += side.partials[use]


@nb.njit(cache=True)
def predict(
    q: Side,
    kv: Side,
    numbers: tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]],
    device: np.ndarray,
    phase: np.ndarray,
    work: Work,
    node: np.ndarray,
    links: Links,
) -> float:
    """Seconds until the last rank is done: what `hf_dcp.planning.simulate` says of the rank plans, without making them.
    Query rows are counted by Q block: where tiles of a block hold different ones, times with ``row_s`` are close, not equal.

    Args:
        numbers: of `exchange_numbers`, for Q and for KV.
        device: int32[tiles, groups]
        phase: int32[units]
        node: int32[world_size]
    """
    world = len(node)
    most = 2 * phase.max() + 4 if len(phase) > 0 else 1
    for arrive, leave in numbers:
        if len(arrive) > 0:
            most = max(most, arrive.max() + 1, leave.max() + 1)
    traffic = np.zeros((most, 2, world, world), np.int64)
    _count_bytes(q, numbers[0], traffic)
    _count_bytes(kv, numbers[1], traffic)
    return _run(traffic, _compute(device, phase, work, links, world, most // 2 + 1), node, links)


@nb.njit(cache=True)
def _compute(device, phase, work, links, world, phases):
    """Seconds of every device in every phase: float64[world_size, phases]."""
    tiles, groups = device.shape
    compute, rows = np.zeros((world, phases)), np.zeros((world, phases))
    launched = np.zeros((world, phases), np.bool_)
    blocks = work.q.max() + 1 if tiles > 0 and work.row_s > 0 else 0
    counted = np.zeros((phases, world, groups, blocks), np.bool_)
    for t in range(tiles):
        for g in range(groups):
            d, p = device[t, g], phase[t * groups + g]
            compute[d, p] += work.seconds[t]
            launched[d, p] = True
            if blocks > 0 and not counted[p, d, g, work.q[t]]:
                counted[p, d, g, work.q[t]] = True
                rows[d, p] += work.rows[t]
    return compute + rows * work.row_s + links.launch * launched


@nb.njit(cache=True)
def _run(traffic, compute, node, links):
    world = len(node)
    clock = np.full(world, links.call)
    sent, received = np.zeros((world, 2)), np.zeros((world, 2))  # when queues are free: between nodes, inside
    begin, end = np.zeros(traffic.shape), np.zeros(traffic.shape)
    waiting = np.empty((2 * world, 4))
    for p in range(compute.shape[1]):
        for x in range(2 * p, min(2 * p + 2, len(traffic))):
            for rank in range(world):
                for partial in range(2):
                    for peer in range(world):
                        size = traffic[x, partial, rank, peer]
                        if size > 0:
                            inside = int(node[rank] == node[peer])
                            begin[x, partial, rank, peer] = max(clock[rank], sent[rank, inside])
                            sent[rank, inside] = begin[x, partial, rank, peer] + size * links.seconds[2 - inside]
                            end[x, partial, rank, peer] = sent[rank, inside]
        clock += compute[:, p]
        for x in range(max(0, 2 * p - 1), min(2 * p + 1, len(traffic))):
            for rank in range(world):
                count = 0
                for partial in range(2):
                    for peer in range(world):
                        if traffic[x, partial, peer, rank] > 0:
                            row = (begin[x, partial, peer, rank], end[x, partial, peer, rank])
                            inside = int(node[rank] == node[peer])
                            at = count
                            while at > 0 and row < (waiting[at - 1, 0], waiting[at - 1, 1]):
                                waiting[at] = waiting[at - 1]
                                at -= 1
                            waiting[at, 0], waiting[at, 1] = row
                            waiting[at, 2], waiting[at, 3] = traffic[x, partial, peer, rank], inside
                            count += 1
                for i in range(count):
                    inside = int(waiting[i, 3])
                    free = max(received[rank, inside], waiting[i, 0]) + waiting[i, 2] * links.seconds[2 - inside]
                    received[rank, inside] = free
                    clock[rank] = max(clock[rank], max(free, waiting[i, 1]) + links.latency[2 - inside])
    for rank in range(world):
        clock[rank] = max(clock[rank], sent[rank].max())
    return clock.max()
