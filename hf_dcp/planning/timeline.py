"""When rows travel: the numbers of exchanges, and how long an attention call takes with them.

**Exchanges.** An exchange is started at the beginning of a phase, and complete at its end or at the end of the next one.
Number 2 p belongs to phase p alone; number 2 p + 1 is started in phase p and complete at the end of phase p + 1. So
numbers ascend with starts and with ends, on all ranks, and a link that keeps the order serves what is needed first.
Rows straight from their owner that phase p needs have two phases' time: number 2 p - 3 (phase 1: number 0). Rows passed
on by a gateway, which has to have them, have one: 2 p - 2. Partial results made in phase p, the last that adds to them, leave
as number 2 p + 3 for their owner, or 2 p + 2 for a gateway, which adds its own and sends them on a phase later.

A `Timeline` is kept up to date while devices change their divisions: what is the same isn't counted again.
"""

from __future__ import annotations

from typing import NamedTuple

import numba as nb
import numpy as np

from hf_dcp.planning.links import Links
from hf_dcp.planning.transfers import BETWEEN, Transfers
from hf_dcp.planning.units import Units

NEVER = 1 << 30
LATE = 6
"""The last phase comes less than so many after as many as there may be divisions; and results go home after it."""


def started_in(exchange: int) -> int:
    """The phase in which an exchange is started."""
    return exchange // 2


def completed_in(exchange: int) -> int:
    """The phase at whose end an exchange is complete."""
    return (exchange + 1) // 2


class Timeline(NamedTuple):
    """When all devices compute and exchange in one pass."""

    first: np.ndarray
    """int64[uses]: the first phase in which the device's own units need the rows."""
    last: np.ndarray
    """int64[uses]: the last one."""
    arrive: np.ndarray
    """int64[uses]: the exchange in which the rows arrive."""
    leave: np.ndarray
    """int64[uses]: the exchange in which their partial results leave."""
    compute: np.ndarray
    """float64[world_size, phases]: seconds."""
    traffic: np.ndarray
    """int64[exchanges, 2, world_size, world_size]: bytes of inputs and of partial results, from one device to another."""
    sends: np.ndarray
    """int64[exchanges, 2, world_size]: uses that a device sends rows for."""
    receives: np.ndarray
    """int64[exchanges, 2, world_size]: those that it receives rows for."""
    span: np.ndarray
    """float64[exchanges, 2, world_size, world_size, 2]: when a message leaves its sender, first and last byte."""
    cause: np.ndarray
    """int64[world_size, phases, 2]: whose message a device waits for longest at the end of a phase, and the phase in which it
    was started; -1 where it doesn't wait."""
    counted: np.ndarray
    """bool[phases, blocks]: scratch, all False: whether a Q block's rows are counted already."""


def make_timeline(transfers: Transfers, units: Units, divisions: int) -> Timeline:
    """An empty one, for schedules of at most so many divisions."""
    world, uses, phases = len(units.begin) - 1, len(transfers.kind), divisions + LATE
    return Timeline(
        first=np.full(uses, NEVER),
        last=np.full(uses, -1),
        arrive=np.full(uses, -1),
        leave=np.full(uses, -1),
        compute=np.zeros((world, phases)),
        traffic=np.zeros((2 * phases, 2, world, world), np.int64),
        sends=np.zeros((2 * phases, 2, world), np.int64),
        receives=np.zeros((2 * phases, 2, world), np.int64),
        span=np.zeros((2 * phases, 2, world, world, 2)),
        cause=np.full((world, phases, 2), -1),
        counted=np.zeros((phases, int(units.block.max(initial=-1)) + 1), bool),
    )


@nb.njit(cache=True)
def predict(
    line: Timeline, transfers: Transfers, units: Units, links: Links, phase: np.ndarray, node: np.ndarray
) -> float:
    """Seconds until the last rank is done: what `hf_dcp.planning.simulate` says of the rank plans, without making them.
    Query rows are counted by Q block: where tiles of a block hold different ones, times with ``links.row`` are only close.

    Args:
        line: holds this schedule afterwards.
        phase: int32[units]
        node: int32[world_size]
    """
    for device in range(len(node)):
        put_device(line, transfers, units, links, phase, device)
    number_exchanges(line, transfers)
    return run(line, links, node, np.inf).max()


@nb.njit(cache=True)
def put_device(line, transfers, units, links, phase, device):
    """Note the phases of one device's units, new or changed ones."""
    ptr, uses, seconds = transfers.unit_ptr, transfers.unit_use, units.seconds
    first, last, compute = line.first, line.last, line.compute[device]
    own = units.front[units.begin[device] : units.begin[device + 1]]
    compute[:] = 0.0
    for unit in own:
        for p in range(ptr[unit], ptr[unit + 1]):
            first[uses[p]], last[uses[p]] = NEVER, -1
    for unit in own:
        when = phase[unit]
        for p in range(ptr[unit], ptr[unit + 1]):
            first[uses[p]], last[uses[p]] = min(first[uses[p]], when), max(last[uses[p]], when)
        if compute[when] == 0.0:
            compute[when] = links.launch
        compute[when] += seconds[unit]
    if links.row > 0.0:
        counted, block, rows = line.counted, units.block, units.rows
        for unit in own:
            if not counted[phase[unit], block[unit]]:
                counted[phase[unit], block[unit]] = True
                compute[phase[unit]] += rows[unit] * links.row
        for unit in own:
            counted[phase[unit], block[unit]] = False


@nb.njit(cache=True)
def exchange_numbers(transfers: Transfers, phase: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """In which exchange the rows of every use arrive, and in which their partial results leave: int64[uses] each.

    Args:
        phase: int32[units]
    """
    first, last = np.full(len(transfers.kind), NEVER), np.full(len(transfers.kind), -1)
    for unit in range(len(phase)):
        for p in range(transfers.unit_ptr[unit], transfers.unit_ptr[unit + 1]):
            use = transfers.unit_use[p]
            first[use] = min(first[use], phase[unit])
            last[use] = max(last[use], phase[unit])
    return _numbers(transfers, first, last)


@nb.njit(cache=True)
def _numbers(transfers, first, last):
    via = transfers.via
    for use in range(len(first)):
        gateway = via[use]
        if gateway >= 0:
            first[gateway] = min(first[gateway], first[use] - 1)
            last[gateway] = max(last[gateway], last[use] + 1)
    arrive, leave = np.empty(len(first), np.int64), np.empty(len(first), np.int64)
    for use in range(len(first)):
        relayed = via[use] >= 0
        arrive[use] = 2 * first[use] - 2 if relayed else max(0, 2 * first[use] - 3)
        leave[use] = 2 * last[use] + 2 if relayed else 2 * last[use] + 3
    return arrive, leave


@nb.njit(cache=True)
def number_exchanges(line, transfers):
    """Bring numbers of exchanges and traffic up to date, after `put_device`."""
    device, source, inputs, partials = transfers.device, transfers.source, transfers.inputs, transfers.partials
    arrived, left, traffic, sends, receives = line.arrive, line.leave, line.traffic, line.sends, line.receives
    arrive, leave = _numbers(transfers, line.first.copy(), line.last.copy())
    for u in range(len(arrive)):
        if arrive[u] != arrived[u]:
            _send(traffic, sends, receives, arrived[u], 0, source[u], device[u], -inputs[u], -1)
            _send(traffic, sends, receives, arrive[u], 0, source[u], device[u], inputs[u], 1)
            arrived[u] = arrive[u]
        if leave[u] != left[u]:
            if partials[u] > 0:
                _send(traffic, sends, receives, left[u], 1, device[u], source[u], -partials[u], -1)
                _send(traffic, sends, receives, leave[u], 1, device[u], source[u], partials[u], 1)
            left[u] = leave[u]


@nb.njit(cache=True, forceinline=True)
def _send(traffic, sends, receives, exchange, partial, sender, receiver, size, count):
    if exchange >= 0:
        traffic[exchange, partial, sender, receiver] += size
        sends[exchange, partial, sender] += count
        receives[exchange, partial, receiver] += count


@nb.njit(cache=True)
def run(line, links, node, bound):
    """When every device is done: float64[world_size], in seconds; it may end early, above ``bound``, if one needs longer."""
    compute, cause, seconds, latency = line.compute, line.cause, links.seconds, links.latency
    traffic, sends, receives, span = line.traffic, line.sends, line.receives, line.span
    world, phases = compute.shape
    clock = np.full(world, links.call)
    left = compute.sum(1)
    sent, received = np.zeros((world, 2)), np.zeros((world, 2))  # when queues are free: between nodes, inside
    waiting = np.empty((2 * world, 5))
    cause[:] = -1
    for p in range(phases):
        for x in range(2 * p, 2 * p + 2):
            for rank in range(world):
                for partial in range(2):
                    if sends[x, partial, rank] > 0:
                        _start(
                            traffic[x, partial, rank],
                            span[x, partial, rank],
                            seconds,
                            node,
                            rank,
                            clock[rank],
                            sent[rank],
                        )
        for rank in range(world):
            clock[rank] += compute[rank, p]
            left[rank] -= compute[rank, p]
        for x in range(max(0, 2 * p - 1), 2 * p + 1):
            for rank in range(world):
                count = 0
                for partial in range(2):
                    if receives[x, partial, rank] > 0:
                        count = _list_incoming(traffic[x, partial], span[x, partial], node, rank, waiting, count)
                for i in range(count):
                    inside = int(waiting[i, 3])
                    free = max(received[rank, inside], waiting[i, 0]) + waiting[i, 2] * seconds[BETWEEN - inside]
                    received[rank, inside] = free
                    there = max(free, waiting[i, 1]) + latency[BETWEEN - inside]
                    if there > clock[rank]:
                        clock[rank] = there
                        cause[rank, p, 0], cause[rank, p, 1] = int(waiting[i, 4]), x // 2
        if np.max(clock + left) > bound:
            return clock + left
    for rank in range(world):
        clock[rank] = max(clock[rank], sent[rank].max())
    return clock


@nb.njit(cache=True, forceinline=True)
def _start(traffic, span, seconds, node, rank, clock, sent):
    """Send what a device has to send in an exchange, inputs or partial results."""
    for peer in range(len(node)):
        if traffic[peer] > 0:
            inside = int(node[rank] == node[peer])
            span[peer, 0] = max(clock, sent[inside])
            sent[inside] = span[peer, 0] + traffic[peer] * seconds[BETWEEN - inside]
            span[peer, 1] = sent[inside]


@nb.njit(cache=True, forceinline=True)
def _list_incoming(traffic, span, node, rank, waiting, count):
    """Insert what a device receives in an exchange, inputs or partial results, in the order in which it was sent: rows of
    (first byte leaves, last byte leaves, bytes, inside the node, sender). How many there are now."""
    for peer in range(len(node)):
        if traffic[peer, rank] > 0:
            begin, end = span[peer, rank, 0], span[peer, rank, 1]
            at = count
            while at > 0 and (begin, end) < (waiting[at - 1, 0], waiting[at - 1, 1]):
                for column in range(5):
                    waiting[at, column] = waiting[at - 1, column]
                at -= 1
            waiting[at, 0], waiting[at, 1], waiting[at, 2] = begin, end, traffic[peer, rank]
            waiting[at, 3], waiting[at, 4] = int(node[rank] == node[peer]), peer
            count += 1
    return count


@nb.njit(cache=True)
def list_involved(line, node, clock, found):
    """The devices that the last one waits for, directly or not, and those with which these shared the links at that time: how
    many are listed in ``found``; none if it doesn't wait at all."""
    traffic, cause = line.traffic, line.cause
    rank, p = np.argmax(clock), cause.shape[1] - 1
    involved = np.zeros(len(node), np.bool_)
    while p >= 0:
        sender, start = cause[rank, p]
        if sender < 0:
            p -= 1
            continue
        inside = node[sender] == node[rank]
        for x in range(max(0, 2 * start - 2), 2 * start + 2):
            for partial in range(2):
                for peer in range(len(node)):
                    after = traffic[x, partial, sender, peer] > 0 and (node[sender] == node[peer]) == inside
                    before = traffic[x, partial, peer, rank] > 0 and (node[peer] == node[rank]) == inside
                    involved[peer] |= after | before
        involved[sender] = involved[rank] = True
        rank, p = sender, start - 1
    count = 0
    for device in range(len(node)):
        if involved[device]:
            found[count] = device
            count += 1
    return count
