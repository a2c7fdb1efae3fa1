"""Predicted times of a plan: its programs run over a simple model of devices and links.

The model: a device computes attention at a fixed rate, and has one outgoing and one incoming queue for links between
nodes and one of each inside its node; a message occupies the sender's and the receiver's queue for bytes / rate. A call,
each of its divisions, and each query row of these take a fixed time beyond that. It knows no contention beyond the
devices' own links, so it is good for comparing plans, not for promises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hf_dcp.planning.batch import ModelShape, RowBytes
from hf_dcp.planning.plan import Item, Message, Op, PassPlan, RankPlan, Slice, WindowPlan
from hf_dcp.rates import DEFAULT_HARDWARE, HARDWARE, Rates

__all__ = ["DEFAULT_HARDWARE", "HARDWARE", "PassTimes", "Rates", "item_areas", "message_bytes", "simulate"]

Record = Callable[[int, Op, int, float, float], None]
BACKWARD_FLOPS = 2.5
"""Backward over forward: five matrix products for two (Dao, FlashAttention-2, section 4.1)."""
BACKWARD_ROWS = 1.5
"""Backward over forward: rows of Q, dO and dQ for those of Q and O."""


def unit_flops(shape: ModelShape, head_groups: int, which: str) -> float:
    """FLOPs of an attended element of one head group in the pass."""
    return 4 * shape.head_dim * (shape.heads // head_groups) * (1.0 if which == "forward" else BACKWARD_FLOPS)


def row_seconds(rates: Rates, head_groups: int, which: str) -> float:
    """Seconds that a division takes for each query row of one head group, beyond its arithmetic."""
    return rates.row_s * (1.0 if which == "forward" else BACKWARD_ROWS) / head_groups


@dataclass(frozen=True)
class PassTimes:
    """One pass of attention over all ranks, in seconds."""

    total_s: float
    """Until the last rank is done."""
    compute_s: float
    """Compute of the busiest rank."""
    exposed_s: float
    """Exposed exchange: how much longer the pass takes than the busiest rank computes."""
    division_share: list[float]
    """Compute of each division over that of the whole pass, all ranks together."""
    division_bytes: list[int]
    """Bytes of each exchange, all ranks together."""


def simulate(
    rank_plans: Sequence[RankPlan],
    which: str,
    rates: Rates,
    window: int | None = None,
    record: Record | None = None,
) -> PassTimes:
    """Predict one attention call of all ranks.

    Args:
        which: ``"forward"``, ``"backward"`` or ``"backward_keep"``.
        window: the layers' sliding window.
        record: called for each instruction with (rank, Op, argument, begin, end), in seconds.
    """
    parts = [plan.window(window) for plan in rank_plans]
    return _Simulation(rank_plans, parts, which, rates, record).run()


def item_areas(part: WindowPlan) -> np.ndarray:
    """Attended elements of every item, for one query head: int64[items]."""
    items = part.items.astype(np.int64)
    area = items[:, Item.Q_COUNT] * items[:, Item.KV_COUNT]
    for i in np.flatnonzero(items[:, Item.SLICE_BEGIN] < items[:, Item.SLICE_END]):
        area[i] = _masked_area(items[i], part.slices[items[i, Item.SLICE_BEGIN] : items[i, Item.SLICE_END]])
    return area


def _masked_area(item: np.ndarray, slices: np.ndarray) -> int:
    """Elements of the slices inside the item: sums of clipped linear functions, row by row of each slice."""
    q, kv, total = item[Item.Q_TOKEN], item[Item.KV_TOKEN], 0
    for s in slices.astype(np.int64):
        row = np.arange(max(q, s[Slice.Q_BEGIN]), min(q + item[Item.Q_COUNT], s[Slice.Q_END])) - s[Slice.Q_BEGIN]
        lo = np.maximum(s[Slice.LO] + row * s[Slice.LO_SLOPE], kv)
        hi = np.minimum(s[Slice.HI] + row * s[Slice.HI_SLOPE], kv + item[Item.KV_COUNT])
        total += int(np.maximum(hi - lo, 0).sum())
    return total


class _Simulation:
    def __init__(
        self, plans: Sequence[RankPlan], parts: list[WindowPlan], which: str, rates: Rates, record: Record | None
    ) -> None:
        first = plans[0]
        self.record = record
        self.rates, self.node = rates, first.node_of_rank
        self.programs = [part.forward if which == "forward" else part.backward for part in parts]
        pair_s = unit_flops(first.shape, first.head_groups, which) / rates.device_flops
        row_s = row_seconds(rates, first.head_groups, which)
        self.seconds = [
            pair_s * _division_work(program, item_areas(part)) + row_s * _division_rows(program, part.items)
            for program, part in zip(self.programs, parts, strict=True)
        ]
        row_bytes = RowBytes.of(first.shape, first.head_groups, first.reduce_dtype)
        self.bytes = [message_bytes(p, row_bytes, which) for p in self.programs]
        world = len(plans)
        self.clock = np.full(world, rates.call_s)
        self.sent: dict[tuple[int, int], list[tuple[float, float, int, int]]] = {}
        self.out_free, self.in_free = np.zeros((world, 2)), np.zeros((world, 2))

    def run(self) -> PassTimes:
        position = [0] * len(self.programs)
        ready = True
        while ready:
            ready = False
            for rank, program in enumerate(self.programs):
                while position[rank] < len(program.program) and self._step(rank, *program.program[position[rank]]):
                    position[rank] += 1
                    ready = True
        busy = np.array([s.sum() for s in self.seconds])
        longest = max(self.rates.call_s + len(s) * self.rates.launch_s + float(s.sum()) for s in self.seconds)
        shares = _padded_sum([s / max(busy.sum(), 1e-30) for s in self.seconds])
        pairs = zip(self.programs, self.bytes, strict=True)
        moved = _padded_sum([_bytes_by_exchange(program, size) for program, size in pairs])
        return PassTimes(
            total_s=float(self.clock.max()),
            compute_s=float(busy.max()),
            exposed_s=float(self.clock.max() - longest),
            division_share=[float(x) for x in shares],
            division_bytes=[int(x) for x in moved],
        )

    def _step(self, rank: int, op: int, argument: int) -> bool:
        begin = float(self.clock[rank])
        done = self._execute(rank, op, argument)
        if done and self.record is not None:
            self.record(rank, Op(op), int(argument), begin, float(self.clock[rank]))
        return done

    def _execute(self, rank: int, op: int, argument: int) -> bool:
        if op == Op.ATTEND:
            self.clock[rank] += self.rates.launch_s + self.seconds[rank][argument]
        elif op == Op.START:
            self._start(rank, argument)
        elif op == Op.WAIT:
            return self._wait(rank, argument)
        elif op == Op.FINISH:
            self.clock[rank] = max(self.clock[rank], *self.out_free[rank])
        return True

    def _start(self, rank: int, exchange: int) -> None:
        for i in self._messages(rank, exchange, incoming=0):
            peer, size = int(self.programs[rank].messages[i, Message.PEER]), int(self.bytes[rank][i])
            inside = int(self.node[rank] == self.node[peer])
            begin = max(self.clock[rank], self.out_free[rank, inside])
            self.out_free[rank, inside] = begin + self._duration(size, inside)
            self.sent.setdefault((peer, exchange), []).append((begin, self.out_free[rank, inside], size, inside))

    def _wait(self, rank: int, exchange: int) -> bool:
        expected = self._messages(rank, exchange, incoming=1)
        arrived = self.sent.get((rank, exchange), [])
        if len(arrived) < len(expected):
            return False
        done = self.clock[rank]
        for begin, end, size, inside in sorted(arrived):
            free = max(self.in_free[rank, inside], begin) + self._duration(size, inside)
            self.in_free[rank, inside] = free
            latency = self.rates.intra_latency_s if inside else self.rates.latency_s
            done = max(done, free + latency, end + latency)
        self.clock[rank] = done
        return True

    def _messages(self, rank: int, exchange: int, incoming: int) -> np.ndarray:
        """Those that carry anything: where backward keeps rows of forward, some don't."""
        table, carries = self.programs[rank].messages, self.bytes[rank] > 0
        return np.flatnonzero(
            (table[:, Message.EXCHANGE] == exchange) & (table[:, Message.INCOMING] == incoming) & carries
        )

    def _duration(self, size: int, inside: int) -> float:
        return size / (self.rates.intra_bytes if inside else self.rates.inter_bytes)


def message_bytes(program: PassPlan, row_bytes: RowBytes, which: str) -> np.ndarray:
    """Payload bytes of every message of a program: int64[messages].

    Args:
        which: ``"forward"``, ``"backward"`` or ``"backward_keep"``.
    """
    total = np.zeros(len(program.messages), np.int64)
    partial = program.messages[:, Message.PARTIAL] == 1
    inputs, partials = row_bytes.inputs(which), row_bytes.partials(which)
    for side, (runs, begin) in enumerate(((program.q_runs, Message.Q_BEGIN), (program.kv_runs, Message.KV_BEGIN))):
        before = np.concatenate([[0], np.cumsum(runs[:, 1].astype(np.int64))])
        rows = before[program.messages[:, begin + 1]] - before[program.messages[:, begin]]
        total += rows * np.where(partial, partials[side], inputs[side])
    return total


def _division_work(program: PassPlan, areas: np.ndarray) -> np.ndarray:
    before = np.concatenate([[0], np.cumsum(areas[program.order])])
    return np.diff(before[program.divisions]).astype(np.float64)


def _division_rows(program: PassPlan, items: np.ndarray) -> np.ndarray:
    """Query rows of every division, each counted once in it."""
    rows = np.zeros(len(program.divisions) - 1)
    for division, (begin, end) in enumerate(zip(program.divisions[:-1], program.divisions[1:], strict=True)):
        own = items[program.order[begin:end]]
        _, first = np.unique(own[:, Item.Q_SLOT], return_index=True)
        rows[division] = own[first, Item.Q_COUNT].sum()
    return rows


def _bytes_by_exchange(program: PassPlan, size: np.ndarray) -> np.ndarray:
    sent = program.messages[:, Message.INCOMING] == 0
    return np.bincount(program.messages[sent, Message.EXCHANGE], weights=size[sent])


def _padded_sum(arrays: list[np.ndarray]) -> np.ndarray:
    total = np.zeros(max((len(a) for a in arrays), default=0))
    for array in arrays:
        total[: len(array)] += array
    return total
