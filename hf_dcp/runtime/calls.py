"""From the items of a division to few large kernel calls.

A CPU kernel is fast on rectangles that are large and fully attended to. Items are tiles: often small, often partly
masked. This module regroups the items of one division and head group: it walks down a binary tree over their Q rows;
at every node it emits the KV columns that *all* rows of the node attend to as one unmasked call, and hands what is left
to the two halves. What remains at the bottom are thin triangles, which run under the kernel's causal flag or a mask.
A causal square, for example, becomes a large square, two of half its size, four of a quarter, ... and small triangles.

Rows and columns are counted in **places**: local token i has place i; remote row r has place ``num_local + 1 + r``, so
that the place ``num_local`` is never used and local and remote rows are never neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from hf_dcp.planning.plan import Item, RankPlan, Slice, WindowPlan
from hf_dcp.runtime.intervals import Intervals, merge, subtract, union, width

CALL_COST = 470_000
"""What a further kernel call costs, in (attended elements x heads x head dim); measured on one core."""
SPLIT_GAIN = 5
"""A node is split where its masked waste exceeds so many calls; at 128 rows both choices cost the same."""
MIN_COLUMNS = 16
"""Columns that are worth a call of their own before a node is split."""
SAMPLES = 64
"""Rows of a piece that are looked at to estimate its area."""
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
    """One kernel call: rows [q_begin, q_end) of a head group against the KV columns of ``kv``, all in places."""

    group: int
    q: tuple[int, int]
    kv: tuple[tuple[int, int], ...]
    kind: Kind
    mask: MaskSpec | None = None


def build_calls(plan: RankPlan, part: WindowPlan, order: np.ndarray) -> list[Call]:
    """The kernel calls for the items ``order`` (indices) of one window: every element of them exactly once."""
    calls: list[Call] = []
    cost = max(1, CALL_COST // (plan.shape.head_dim * (plan.shape.heads // plan.head_groups)))
    for group, pieces in pieces_by_group(plan, part, np.asarray(order, np.int64)):
        for begin, end in merge(pieces[:, :2]):
            inside = pieces[(pieces[:, 0] >= begin) & (pieces[:, 1] <= end)]
            calls.extend(_Splitter(group, cost).split(inside, begin, end, []))
    return calls


# Columns of a piece: rows [R0, R1); row r attends to [LO + (r - R0) * LS, HI + (r - R0) * HS), cut to [C0, C1).
R0, R1, LO, HI, LS, HS, C0, C1 = range(8)


def pieces_by_group(plan: RankPlan, part: WindowPlan, order: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Every item or slice of an item as a piece in places: (group, int64[pieces, 8])."""
    items = part.items[order].astype(np.int64)
    if not len(items):
        return
    q, group = _places(plan, part.q_remote, items[:, Item.Q_SLOT])
    kv, kv_group = _places(plan, part.kv_remote, items[:, Item.KV_SLOT])
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


def _places(plan: RankPlan, remote: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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
    """Walks down the rows of one head group; ``cost`` is a call's cost in attended elements."""

    def __init__(self, group: int, cost: int) -> None:
        self.group, self.cost = group, cost

    def split(self, pieces: np.ndarray, begin: int, end: int, done: Intervals) -> Iterator[Call]:
        """Calls for rows [begin, end) of the pieces, without the columns ``done``, which an ancestor has emitted."""
        cut = _cut(pieces, begin, end)
        if not len(cut):
            return
        rows = end - begin
        common = subtract(_common(cut, rows), done)
        rest = subtract(subtract(merge(np.stack([_lo_min(cut), _hi_max(cut)], 1)), done), common)
        allowed, masked = SPLIT_GAIN * self.cost, rows * width(rest)
        if rows <= MIN_ROWS or masked <= allowed or masked - _area(cut, rest) <= allowed:
            yield from self._leaf(cut, begin, end, common, rest)
            return
        middle = _middle(cut, begin, end)
        if width(common) >= MIN_COLUMNS and rows * width(common) >= 2 * self.cost:
            yield self._call(begin, end, common, Kind.FULL)
            done = union(done, common)
        yield from self.split(cut, begin, middle, done)
        yield from self.split(cut, middle, end, done)

    def _leaf(self, cut: np.ndarray, begin: int, end: int, common: Intervals, rest: Intervals) -> Iterator[Call]:
        rows = end - begin
        if not rest:
            if common:
                yield self._call(begin, end, common, Kind.FULL)
            return
        triangle = _triangle(cut, rest, begin, end)
        if triangle is None and rows * width(common) < 2 * self.cost:
            common, rest = [], union(common, rest)
        if triangle is not None:
            first, column = triangle
            if first == begin + 1 and any(last == column for _, last in common):
                # The column before is still to do, for all rows: taken in, it makes the triangle as large as the node.
                first, column = begin, column - 1
                common = subtract(common, [(column, column + 1)])
            yield self._call(first, end, [(column, column + end - first)], Kind.CAUSAL)
        else:
            yield self._call(begin, end, rest, Kind.MASKED, _mask_spec(cut, begin, end, rest))
        if common:
            yield self._call(begin, end, common, Kind.FULL)

    def _call(self, begin: int, end: int, kv: Intervals, kind: Kind, mask: MaskSpec | None = None) -> Call:
        return Call(self.group, (begin, end), tuple(kv), kind, mask)


def _cut(pieces: np.ndarray, begin: int, end: int) -> np.ndarray:
    """The pieces cut to rows [begin, end); pieces without such rows dropped."""
    cut = pieces[(pieces[:, R0] < end) & (pieces[:, R1] > begin)].copy()
    skip = np.maximum(begin - cut[:, R0], 0)
    cut[:, R0] += skip
    cut[:, LO] += skip * cut[:, LS]
    cut[:, HI] += skip * cut[:, HS]
    cut[:, R1] = np.minimum(cut[:, R1], end)
    return cut


def _lo_min(p: np.ndarray) -> np.ndarray:
    return np.clip(p[:, LO], p[:, C0], p[:, C1])


def _lo_max(p: np.ndarray) -> np.ndarray:
    return np.clip(p[:, LO] + (p[:, R1] - p[:, R0] - 1) * p[:, LS], p[:, C0], p[:, C1])


def _hi_min(p: np.ndarray) -> np.ndarray:
    return np.clip(p[:, HI], p[:, C0], p[:, C1])


def _hi_max(p: np.ndarray) -> np.ndarray:
    return np.clip(p[:, HI] + (p[:, R1] - p[:, R0] - 1) * p[:, HS], p[:, C0], p[:, C1])


def _common(p: np.ndarray, rows: int) -> Intervals:
    """Columns that all rows attend to: there the pieces' rows add up, since pieces are disjoint."""
    lo, hi, count = _lo_max(p), _hi_min(p), p[:, R1] - p[:, R0]
    keep = lo < hi
    at = np.concatenate([lo[keep], hi[keep]])
    change = np.concatenate([count[keep], -count[keep]])
    order = np.argsort(at, kind="stable")
    at, total = at[order], np.cumsum(change[order])
    inside = np.flatnonzero((total[:-1] == rows) & (at[:-1] < at[1:])) if len(at) else np.zeros(0, np.int64)
    return merge(np.stack([at[inside], at[inside + 1]], 1)) if len(inside) else []


def _area(p: np.ndarray, inside: Intervals) -> int:
    """About how many attended elements are in the columns ``inside``: exact for pieces of few rows, else by samples."""
    count = (p[:, R1] - p[:, R0])[:, None]
    samples = min(SAMPLES, int(count.max()))
    step = (2 * np.arange(samples) + 1) * count // (2 * samples)
    lo = np.clip(p[:, LO, None] + step * p[:, LS, None], p[:, C0, None], p[:, C1, None])
    hi = np.clip(p[:, HI, None] + step * p[:, HS, None], p[:, C0, None], p[:, C1, None])
    total = 0.0
    for begin, end in inside:
        width_of_row = np.maximum(np.minimum(hi, end) - np.maximum(lo, begin), 0)
        total += float((width_of_row.mean(1) * count[:, 0]).sum())
    return round(total)


def _middle(p: np.ndarray, begin: int, end: int) -> int:
    """Where to halve the rows: at a bound of a piece if one is near the middle."""
    middle = (begin + end) // 2
    bounds = np.unique(p[:, :2])
    near = bounds[np.abs(bounds - middle) <= (end - begin) // 4]
    return int(near[np.argmin(np.abs(near - middle))]) if len(near) else middle


def _triangle(p: np.ndarray, rest: Intervals, begin: int, end: int) -> tuple[int, int] | None:
    """(first row, first column) if what is left is one aligned causal triangle that ends with the last row."""
    if len(rest) != 1:
        return None
    column, last = rest[0]
    touching = p[(_lo_min(p) < last) & (_hi_max(p) > column)]
    if len(touching) != 1:
        return None
    piece = touching[0]
    first = end - (last - column)
    diagonal = piece[HS] == 1 and piece[HI] + (first - piece[R0]) == column + 1
    whole = piece[R0] <= first and piece[R1] == end and begin <= first
    return (first, column) if diagonal and whole and _lo_max(touching)[0] <= column and last <= piece[C1] else None


def _mask_spec(p: np.ndarray, begin: int, end: int, columns: Intervals) -> MaskSpec:
    """The pieces in coordinates of a call with these rows and columns, in a form that is equal for equal masks."""
    found: list[tuple[int, ...]] = []
    offset = 0
    for first, last in columns:
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
