"""Pieces: parts of the attended elements with rows and columns in places, and what they say of a run of rows. Compiled.

A piece is a row of int64[pieces, 8]: Q rows [R0, R1); row r attends to the columns from LO + (r - R0) * LS to
HI + (r - R0) * HS, cut to [C0, C1). Slopes are 0 or 1. Pieces of one head group are disjoint.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from hf_dcp.runtime.intervals import merge, subtract, width

R0, R1, LO, HI, LS, HS, C0, C1 = range(8)

SAMPLES = 64
"""Rows of a piece that are looked at to estimate its area."""


@nb.njit(cache=True)
def look_at(
    pieces: np.ndarray, begin: int, end: int, done: np.ndarray, call_cost: int, column_cost: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
    """What rows [begin, end) attend to, but for the columns ``done``.

    Args:
        call_cost, column_cost: what one more call costs, and each of its columns, in elements.

    Returns:
        The pieces cut to these rows; the columns that all rows attend to, but for the first of a diagonal; the others that
        some attend to; whether to compute all under one mask: two halves, with one call more, would save half of its waste.
    """
    cut = cut_rows(pieces, begin, end)
    rows = end - begin
    common = subtract(_common(cut, rows), done)
    bounds = np.empty((len(cut), 2), np.int64)
    for i in range(len(cut)):
        bounds[i, 0], bounds[i, 1] = _lo(cut[i], 0), _hi(cut[i], cut[i, R1] - cut[i, R0] - 1)
    rest = subtract(subtract(merge(bounds), done), common)
    masked = rows * width(rest)
    allowed = 2 * (call_cost + column_cost * (width(common) + width(rest)))
    return cut, common, rest, masked <= allowed or masked - _area(cut, rest) <= allowed


@nb.njit(cache=True)
def cut_rows(pieces: np.ndarray, begin: int, end: int) -> np.ndarray:
    """The pieces cut to rows [begin, end); pieces without such rows dropped."""
    cut = pieces[(pieces[:, R0] < end) & (pieces[:, R1] > begin)]
    for i in range(len(cut)):
        skip = max(begin - cut[i, R0], 0)
        cut[i, R0] += skip
        cut[i, LO] += skip * cut[i, LS]
        cut[i, HI] += skip * cut[i, HS]
        cut[i, R1] = min(cut[i, R1], end)
    return cut


@nb.njit(cache=True)
def middle(p: np.ndarray, begin: int, end: int) -> int:
    """Where to divide rows: at a bound of a piece if one is near the middle, the first of the nearest; else behind the
    largest power of two, so that parts, and what is computed of them, are often equal."""
    half = begin + 1
    while 2 * (half - begin) < end - begin:
        half = begin + 2 * (half - begin)
    best, distance = half, (end - begin) // 4 + 1
    for i in range(len(p)):
        for bound in (p[i, R0], p[i, R1]):
            away = abs(bound - half)
            if begin < bound < end and (away < distance or (away == distance and bound < best and best != half)):
                best, distance = bound, away
    return best


@nb.njit(cache=True)
def triangle(p: np.ndarray, rest: np.ndarray, begin: int, end: int) -> tuple[int, int]:
    """(first row, first column) if ``rest`` is one aligned causal triangle that ends with the last row, else (-1, -1)."""
    nothing = (-1, -1)
    if len(rest) != 1:
        return nothing
    column, last = rest[0, 0], rest[0, 1]
    found = -1
    for i in range(len(p)):
        if _lo(p[i], 0) < last and _hi(p[i], p[i, R1] - p[i, R0] - 1) > column:
            if found >= 0:
                return nothing
            found = i
    if found < 0:
        return nothing
    piece = p[found]
    first = end - (last - column)
    diagonal = piece[HS] == 1 and piece[HI] + (first - piece[R0]) == column + 1
    whole = piece[R0] <= first and piece[R1] == end and begin <= first
    from_left = _lo(piece, piece[R1] - piece[R0] - 1) <= column and last <= piece[C1]
    return (first, column) if diagonal and whole and from_left else nothing


@nb.njit(cache=True)
def _lo(piece: np.ndarray, step: int) -> int:
    """First column of the piece's row ``step``."""
    return min(max(piece[LO] + step * piece[LS], piece[C0]), piece[C1])


@nb.njit(cache=True)
def _hi(piece: np.ndarray, step: int) -> int:
    return min(max(piece[HI] + step * piece[HS], piece[C0]), piece[C1])


@nb.njit(cache=True)
def _common(p: np.ndarray, rows: int) -> np.ndarray:
    """Columns that all rows attend to: there the pieces' rows add up, since pieces are disjoint.

    The first element of a diagonal is left out: it belongs to the triangle beside it, which is then as large as the node.
    """
    at, change = np.empty(2 * len(p), np.int64), np.empty(2 * len(p), np.int64)
    count = 0
    for i in range(len(p)):
        steps = p[i, R1] - p[i, R0]
        lo, hi = _lo(p[i], steps - 1), _hi(p[i], -1 if steps > 1 else 0)
        if lo < hi:
            at[count], at[count + 1] = lo, hi
            change[count], change[count + 1] = steps, -steps
            count += 2
    order = np.argsort(at[:count])
    inside = np.empty((count, 2), np.int64)
    found, total = 0, 0
    for n in range(count - 1):
        total += change[order[n]]
        if total == rows and at[order[n]] < at[order[n + 1]]:
            inside[found, 0], inside[found, 1] = at[order[n]], at[order[n + 1]]
            found += 1
    return merge(inside[:found])


@nb.njit(cache=True)
def _area(p: np.ndarray, inside: np.ndarray) -> float:
    """About how many attended elements are in the columns ``inside``: exact for pieces of few rows, else by samples."""
    total = 0.0
    for i in range(len(p)):
        rows = p[i, R1] - p[i, R0]
        samples = min(SAMPLES, rows)
        for n in range(samples):
            step = (2 * n + 1) * rows // (2 * samples)
            lo, hi = _lo(p[i], step), _hi(p[i], step)
            for j in range(len(inside)):
                total += max(min(hi, inside[j, 1]) - max(lo, inside[j, 0]), 0) * rows / samples
    return total
