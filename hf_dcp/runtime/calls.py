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
from hf_dcp.runtime.intervals import merge, subtract, union, width
from hf_dcp.runtime.pieces import R0, R1, look_at, middle, triangle

CALL_COST = 470_000
"""What a further kernel call costs, in (attended elements x heads x head dim); measured on one core."""
SPLIT_GAIN = 5
"""A node is split where its masked waste exceeds so many calls; at 128 rows both choices cost the same."""
MIN_COLUMNS = 16
"""Columns that are worth a call of their own before a node is split."""
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
        for begin, end in merge(pieces[:, :2]).tolist():
            inside = pieces[(pieces[:, R0] >= begin) & (pieces[:, R1] <= end)]
            calls.extend(_Splitter(group, cost).split(inside, begin, end, np.zeros((0, 2), np.int64)))
    return calls


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
    """Walks down the rows of one head group; ``cost`` is a call's cost in attended elements."""

    def __init__(self, group: int, cost: int) -> None:
        self.group, self.cost = group, cost

    def split(self, pieces: np.ndarray, begin: int, end: int, done: np.ndarray) -> Iterator[Call]:
        """Calls for rows [begin, end) of the pieces, without the columns ``done``, which an ancestor has emitted."""
        cut, common, rest, cheap = look_at(pieces, begin, end, done, SPLIT_GAIN * self.cost)
        if not len(cut):
            return
        rows = end - begin
        if cheap or rows <= MIN_ROWS:
            yield from self._leaf(cut, begin, end, common, rest)
            return
        half = middle(cut, begin, end)
        if width(common) >= MIN_COLUMNS and rows * width(common) >= 2 * self.cost:
            yield self._call(begin, end, common, Kind.FULL)
            done = union(done, common)
        yield from self.split(cut, begin, half, done)
        yield from self.split(cut, half, end, done)

    def _leaf(self, cut: np.ndarray, begin: int, end: int, common: np.ndarray, rest: np.ndarray) -> Iterator[Call]:
        first, column = triangle(cut, rest, begin, end)
        if first >= 0:
            if first == begin + 1 and (common[:, 1] == column).any():
                # The column before is still to do, for all rows: taken in, it makes the triangle as large as the node.
                first, column = begin, column - 1
                common = subtract(common, np.array([[column, column + 1]]))
            triangular = np.array([[column, column + end - first]])
            yield self._call(first, end, triangular, Kind.CAUSAL)
        elif len(rest):
            if (end - begin) * width(common) < 2 * self.cost:
                common, rest = common[:0], union(common, rest)
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
