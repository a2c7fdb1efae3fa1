"""From the items of a division to what FlashAttention's varlen kernels can compute: segments, grouped by window.

A segment is a run of rows against a run of columns under one window (left, right), aligned at the bottom right corner, as
these kernels have it: of n rows and m columns, row i attends to the columns from i + m - n - left to i + m - n + right; -1
stands for no limit. The four kinds of a slice: full (-1, -1), causal (-1, 0), band (w - 1, 0), triangle (m - n, -1).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hf_dcp.planning.plan import RankPlan, WindowPlan
from hf_dcp.runtime.calls import pieces_by_group
from hf_dcp.runtime.pieces import C0, C1, HI, HS, LO, LS, R0, R1

NONE = -1
"""No limit on one side of a window."""


@dataclass(frozen=True, order=True)
class Segment:
    """Rows [q_begin, q_end) against columns [kv_begin, kv_end) of a head group, in places, under one window."""

    group: int
    q_begin: int
    q_end: int
    kv_begin: int
    kv_end: int
    left: int
    right: int

    @property
    def rows(self) -> int:
        return self.q_end - self.q_begin

    @property
    def columns(self) -> int:
        return self.kv_end - self.kv_begin

    @property
    def window(self) -> tuple[int, int]:
        return self.left, self.right

    def allowed(self) -> np.ndarray:
        """bool[rows, columns]: what the kernel attends to."""
        shift = self.columns - self.rows
        row, column = np.arange(self.rows)[:, None], np.arange(self.columns)
        left = (column >= row + shift - self.left) | (self.left == NONE)
        return left & ((column <= row + shift + self.right) | (self.right == NONE))


def build_segments(plan: RankPlan, part: WindowPlan, order: np.ndarray) -> list[Segment]:
    """Segments of the items ``order`` (indices) of one window: every attended pair in exactly one of them."""
    segments: list[Segment] = []
    for group, pieces in pieces_by_group(plan, part, np.asarray(order, np.int64)):
        found = [segment for piece in pieces.tolist() for segment in _of_piece(group, piece)]
        segments += _joined(found)
    return segments


def _of_piece(group: int, piece: list[int]) -> list[Segment]:
    """A piece as segments: cut where a bound meets the piece's columns, rows without columns left out."""
    r0, r1, lo, hi, ls, hs, c0, c1 = (piece[i] for i in (R0, R1, LO, HI, LS, HS, C0, C1))
    rows = r1 - r0
    cuts = {0, rows}
    # Where a rising bound leaves the first column, and where it has gone past the last one.
    if ls:
        cuts |= {min(max(cut, 0), rows) for cut in (c0 - lo, c1 - lo)}
    if hs:
        cuts |= {min(max(cut, 0), rows) for cut in (c0 - hi, c1 - hi + 1)}
    if ls != hs:  # before, or from then on, there is nothing between the bounds
        cuts.add(min(max(lo - hi if hs else hi - lo, 0), rows))
    found = []
    ordered = sorted(cuts)
    for begin, end in pairwise(ordered):
        segment = _straight(
            group, r0, begin, end, _bound(lo, ls, begin, end, c0, c1), _bound(hi, hs, begin, end, c0, c1)
        )
        if segment is not None:
            found.append(segment)
    return found


def _bound(value: int, slope: int, begin: int, end: int, c0: int, c1: int) -> tuple[int, int]:
    """A bound in rows [begin, end), cut to the columns: (value at the first row, slope)."""
    first, last = (min(max(value + step * slope, c0), c1) for step in (begin, end - 1))
    return (first, 1) if last > first else (first, 0)


def _straight(group: int, r0: int, begin: int, end: int, low: tuple[int, int], high: tuple[int, int]) -> Segment | None:
    """The segment of rows whose bounds are straight; None if no column is between them."""
    rows = end - begin
    (lo, ls), (hi, hs) = low, high
    first, last = max(0, lo - hi + 1) if hs and not ls else 0, rows
    if ls and not hs:
        last = min(rows, hi - lo)
    if first >= last or (ls == hs and lo >= hi):
        return None
    begin, end, rows = r0 + begin + first, r0 + begin + last, last - first
    hi += first * hs
    if ls and hs:
        return Segment(group, begin, end, lo, hi + rows - 1, hi - lo - 1, 0)
    if hs:
        return Segment(group, begin, end, lo, hi + rows - 1, NONE, 0)
    if ls:
        return Segment(group, begin, end, lo, hi, hi - lo - rows, NONE)
    return Segment(group, begin, end, lo, hi, NONE, NONE)


def _joined(segments: list[Segment]) -> list[Segment]:
    """Neighbours in one: full ones side by side, full beside causal, full ones above each other."""
    across: list[Segment] = []
    for s in sorted(segments):
        last = across[-1] if across else None
        if last is not None and _beside(last, s):
            across[-1] = Segment(s.group, s.q_begin, s.q_end, last.kv_begin, s.kv_end, NONE, s.right)
        else:
            across.append(s)
    down: list[Segment] = []
    for s in sorted(across, key=lambda s: (s.kv_begin, s.kv_end, s.window, s.q_begin)):
        last = down[-1] if down else None
        full = last is not None and last.window == s.window == (NONE, NONE) and last.q_end == s.q_begin
        if full and last is not None and (last.kv_begin, last.kv_end) == (s.kv_begin, s.kv_end):
            down[-1] = Segment(s.group, last.q_begin, s.q_end, s.kv_begin, s.kv_end, NONE, NONE)
        else:
            down.append(s)
    return sorted(down)


def _beside(left: Segment, right: Segment) -> bool:
    same = (left.q_begin, left.q_end, left.kv_end) == (right.q_begin, right.q_end, right.kv_begin)
    # The causal part must start at its diagonal: then all columns before belong to every row.
    joins = right.window == (NONE, NONE) or (right.window == (NONE, 0) and right.columns >= right.rows)
    return same and left.window == (NONE, NONE) and joins


@dataclass(frozen=True)
class Round:
    """Segments of one head group and window in which no row and no column occurs twice: one call each way."""

    group: int
    window: tuple[int, int]
    segments: tuple[Segment, ...]


def rounds(segments: list[Segment]) -> list[Round]:
    """Segments grouped by window, and such that results can be added without atomics: one kernel call per round."""
    found: list[Round] = []
    open_rounds: dict[tuple[int, tuple[int, int]], list[list[Segment]]] = {}
    for segment in segments:
        candidates = open_rounds.setdefault((segment.group, segment.window), [])
        for candidate in candidates:
            if not any(_overlap(segment, other) for other in candidate):
                candidate.append(segment)
                break
        else:
            candidates.append([segment])
    for (group, window), groups in open_rounds.items():
        found += [Round(group, window, tuple(group_segments)) for group_segments in groups]
    return found


def _overlap(a: Segment, b: Segment) -> bool:
    rows = a.q_begin < b.q_end and b.q_begin < a.q_end
    return rows or (a.kv_begin < b.kv_end and b.kv_begin < a.kv_end)
