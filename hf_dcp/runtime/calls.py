"""From the items of a division to few large kernel calls.

A CPU kernel is fast on rectangles that are large and fully attended to. Items are tiles: often small, often partly
masked. This module regroups the items of one division and head group: it walks down a binary tree over their Q rows;
at every node it emits the KV columns that *all* rows of the node attend to as one unmasked call, if they are many, and
hands what is left to the two halves. What remains at the bottom are thin triangles and bands with few columns beside
them, which run under the kernel's causal flag or a mask. Equal calls at equal distances are made as one.
A causal square, for example, becomes a large square, two of half its size, four of a quarter, ... and small triangles.

Rows and columns are counted in **places**: local token i has place i; remote row r has place ``num_local + 1 + r``, so
that the place ``num_local`` is never used and local and remote rows are never neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from hf_dcp.planning.plan import Item, RankPlan, Slice, WindowPlan
from hf_dcp.runtime.intervals import merge, union, width
from hf_dcp.runtime.pieces import R0, R1, look_at, middle, triangle

CALL_COST = 100_000
"""What a further kernel call costs, in (attended elements x heads x head dim), where equal ones are made at once; this and
the next three were chosen by measurement on one core."""
ROW_COST = 16
"""What a row of a call costs beside its elements (merging), in elements."""
COLUMN_COST = 24
"""What a column of a call costs beside its elements (gathering, adding of gradients), in elements x heads per KV head."""
WORTH = 6
"""Columns that all rows of a node attend to get a call of their own where they have so many times its cost."""
JOINED_ROWS = 512
"""Equal calls are made at once up to so many rows in all, so that what they read and write stays in the cache."""
MIN_ROWS = 32
"""Rows of the smallest node: below, the kernel's own blocking makes smaller calls no cheaper."""


class Kind(IntEnum):
    """How a call is masked."""

    FULL = 0
    CAUSAL = 1
    """As many rows as columns; row i attends to columns 0 ... i."""
    MASKED = 2


@dataclass(frozen=True)
class MaskSpec:
    """The mask of a call, in its own coordinates; equal keys mean equal masks."""

    rows: int
    columns: int
    pieces: tuple[tuple[int, ...], ...]
    """(first row, end row, lo, hi, lo slope, hi slope, first column, end column): row r attends to the columns from
    ``lo + (r - first row) * lo slope`` to ``hi + (r - first row) * hi slope``, inside [first column, end column)."""

    def build(self) -> np.ndarray:
        """bool[rows, columns], true where attended to."""
        allowed = np.zeros((self.rows, self.columns), bool)
        for r0, r1, lo, hi, lo_slope, hi_slope, c0, c1 in self.pieces:
            step = np.arange(r1 - r0)[:, None]
            column = np.arange(c0, c1)[None]
            allowed[r0:r1, c0:c1] |= (column >= lo + step * lo_slope) & (column < hi + step * hi_slope)
        return allowed


@dataclass(frozen=True)
class Call:
    """One kernel call: rows [q_begin, q_end) of a head group against the KV columns of ``kv``, all in places.

    With ``count`` above 1, it is so many equal ones: rows are ``q_step`` places further every time, and every interval of
    columns its own step of ``kv_steps``: as far as the rows, or 0.
    """

    group: int
    q: tuple[int, int]
    kv: tuple[tuple[int, int], ...]
    kind: Kind
    mask: MaskSpec | None = None
    count: int = 1
    q_step: int = 0
    kv_steps: tuple[int, ...] = ()

    def columns(self) -> Iterator[tuple[tuple[int, int], int]]:
        """Every interval of columns with its step."""
        return zip(self.kv, self.kv_steps or (0,) * len(self.kv))

    def single(self) -> Iterator[Call]:
        """The equal calls that this one stands for, one by one."""
        for n in range(self.count):
            q = (self.q[0] + n * self.q_step, self.q[1] + n * self.q_step)
            kv = tuple((begin + n * step, end + n * step) for (begin, end), step in self.columns())
            yield Call(self.group, q, kv, self.kind, self.mask)


def build_calls(plan: RankPlan, part: WindowPlan, order: np.ndarray) -> list[Call]:
    """The kernel calls for the items ``order`` (indices) of one window: every element of them exactly once."""
    calls: list[Call] = []
    shape = plan.shape
    cost = max(1, CALL_COST // (shape.head_dim * (shape.heads // plan.head_groups)))
    column_cost = max(1, COLUMN_COST * shape.kv_heads // shape.heads)
    for group, pieces in pieces_by_group(plan, part, np.asarray(order, np.int64)):
        for begin, end in merge(pieces[:, :2]).tolist():
            inside = pieces[(pieces[:, R0] >= begin) & (pieces[:, R1] <= end)]
            calls.extend(_Splitter(group, cost, column_cost).split(inside, begin, end, np.zeros((0, 2), np.int64)))
    return _joined(calls, plan.num_local)


def pieces_by_group(plan: RankPlan, part: WindowPlan, order: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Every item or slice of an item as a piece in places: (group, int64[pieces, 8])."""
    items = part.items[order].astype(np.int64)
    if not len(items):
        return
    q, group = places_of(plan, part.q_remote, items[:, Item.Q_SLOT])
    kv, kv_group = places_of(plan, part.kv_remote, items[:, Item.KV_SLOT])
    if not np.array_equal(group, kv_group):
        raise ValueError("the rank plan has an item whose Q and KV rows are of different head groups")
    masked = items[:, Item.SLICE_BEGIN] < items[:, Item.SLICE_END]
    zero = np.zeros(int((~masked).sum()), np.int64)
    q_full, kv_full, whole = q[~masked], kv[~masked], items[~masked]
    kv_end = kv_full + whole[:, Item.KV_COUNT]
    full = np.stack([q_full, q_full + whole[:, Item.Q_COUNT], kv_full, kv_end, zero, zero, kv_full, kv_end], 1)
    sliced, owner = _sliced_pieces(part, items[masked], q[masked], kv[masked])
    pieces = np.concatenate([full, sliced])
    groups = np.concatenate([group[~masked], group[masked][owner]])
    for g in np.unique(groups):
        yield int(g), pieces[groups == g]


def _sliced_pieces(part: WindowPlan, items: np.ndarray, q: np.ndarray, kv: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pieces of the masked items, and of which of them each one is."""
    count = items[:, Item.SLICE_END] - items[:, Item.SLICE_BEGIN]
    owner = np.repeat(np.arange(len(items)), count)
    within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    slices = part.slices[items[owner, Item.SLICE_BEGIN] + within].astype(np.int64)
    row_shift = (q - items[:, Item.Q_TOKEN])[owner]
    column_shift = (kv - items[:, Item.KV_TOKEN])[owner]
    first, end = slices[:, Slice.Q_BEGIN] + row_shift, slices[:, Slice.Q_END] + row_shift
    r0 = np.maximum(first, q[owner])
    r1 = np.minimum(end, q[owner] + items[owner, Item.Q_COUNT])
    lo = slices[:, Slice.LO] + column_shift + (r0 - first) * slices[:, Slice.LO_SLOPE]
    hi = slices[:, Slice.HI] + column_shift + (r0 - first) * slices[:, Slice.HI_SLOPE]
    c0, c1 = kv[owner], kv[owner] + items[owner, Item.KV_COUNT]
    pieces = np.stack([r0, r1, lo, hi, slices[:, Slice.LO_SLOPE], slices[:, Slice.HI_SLOPE], c0, c1], 1)
    return pieces[r0 < r1], owner[r0 < r1]


def places_of(plan: RankPlan, remote: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Place and head group of every slot."""
    base = plan.num_local * plan.head_groups
    row = np.maximum(slots - base, 0)
    ends = np.cumsum(remote[:, 1])
    run = np.minimum(np.searchsorted(ends, row, side="right"), max(len(remote) - 1, 0))
    remote_group = remote[run, 2] if len(remote) else np.zeros_like(row)
    local = slots < base
    place = np.where(local, slots // plan.head_groups, plan.num_local + 1 + row)
    return place, np.where(local, slots % plan.head_groups, remote_group)


class _Splitter:
    """Walks down the rows of one head group; costs are in attended elements."""

    def __init__(self, group: int, cost: int, column_cost: int) -> None:
        self.group, self.cost, self.column_cost = group, cost, column_cost

    def split(self, pieces: np.ndarray, begin: int, end: int, done: np.ndarray) -> Iterator[Call]:
        """Calls for rows [begin, end) of the pieces, without the columns ``done``, which an ancestor has emitted."""
        cut, common, rest, cheap = look_at(pieces, begin, end, done, self.cost, self.column_cost)
        if not len(cut):
            return
        if cheap or end - begin <= MIN_ROWS:
            yield from self._leaf(cut, begin, end, common, rest)
            return
        half = middle(cut, begin, end)
        if self._worth(end - begin, width(common)):
            yield self._call(begin, end, common, Kind.FULL)
            done = union(done, common)
        yield from self.split(cut, begin, half, done)
        yield from self.split(cut, half, end, done)

    def _worth(self, rows: int, columns: int) -> bool:
        """Whether these columns, which all rows attend to, get a call of their own."""
        return rows * columns > WORTH * (self.cost + ROW_COST * rows + self.column_cost * columns)

    def _leaf(self, cut: np.ndarray, begin: int, end: int, common: np.ndarray, rest: np.ndarray) -> Iterator[Call]:
        if len(rest) and len(common) and not self._worth(end - begin, width(common)):
            common, rest = common[:0], union(common, rest)
        first, column = triangle(cut, rest, begin, end)
        if first >= 0:
            yield self._call(first, end, np.array([[column, column + end - first]]), Kind.CAUSAL)
        elif len(rest):
            yield self._call(begin, end, rest, Kind.MASKED, _mask_spec(cut, begin, end, rest))
        if len(common):
            yield self._call(begin, end, common, Kind.FULL)

    def _call(self, begin: int, end: int, kv: np.ndarray, kind: Kind, mask: MaskSpec | None = None) -> Call:
        return Call(self.group, (begin, end), tuple((first, last) for first, last in kv.tolist()), kind, mask)


def _mask_spec(p: np.ndarray, begin: int, end: int, columns: np.ndarray) -> MaskSpec:
    """The pieces in coordinates of a call with these rows and columns, in a form that is equal for equal masks."""
    found: list[tuple[int, ...]] = []
    offset = 0
    for first, last in columns.tolist():
        shift = offset - first
        for r0, r1, lo, hi, lo_slope, hi_slope, c0, c1 in p.tolist():
            c0, c1, lo, hi = max(c0, first) + shift, min(c1, last) + shift, lo + shift, hi + shift
            steps = r1 - r0 - 1
            if lo + steps * lo_slope <= c0:
                lo, lo_slope = c0, 0
            if hi >= c1:
                hi, hi_slope = c1, 0
            if max(lo, c0) < min(hi + steps * hi_slope, c1):
                found.append((r0 - begin, r1 - begin, lo, hi, lo_slope, hi_slope, c0, c1))
        offset += last - first
    return MaskSpec(end - begin, offset, tuple(found))


def _joined(calls: list[Call], num_local: int) -> list[Call]:
    """Equal calls at equal distances as one."""
    joined: list[Call] = []
    latest: dict[tuple, int] = {}
    for call in calls:
        sides = tuple((end - begin, begin < num_local) for begin, end in (call.q, *call.kv))
        key = (call.group, call.kind, call.mask, sides)
        longer = _continued(joined[latest[key]], call) if key in latest else None
        if longer is None:
            latest[key] = len(joined)
            joined.append(call)
        else:
            joined[latest[key]] = longer
    return joined


def _continued(run: Call, call: Call) -> Call | None:
    """The run with one more call, None if the call doesn't continue it."""
    rows, past = call.q[1] - call.q[0], run.count - 1
    step = call.q[0] - run.q[0] - past * run.q_step
    steps = tuple(new - old - past * s for (new, _), ((old, _), s) in zip(call.kv, run.columns()))
    fits = step >= rows and set(steps) <= {0, step} if past == 0 else (step, steps) == (run.q_step, run.kv_steps)
    if not fits or (run.count + 1) * rows > JOINED_ROWS:
        return None
    return replace(run, count=run.count + 1, q_step=step, kv_steps=steps)
