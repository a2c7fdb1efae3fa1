"""KV ranges of query tokens, as arrays: normal form, sliding windows, slices.

Ranges are int32[L, R, 2]: token i attends to the KV tokens of the union of the half-open ranges ``ranges[i]``. In
**normal form** the ranges of a token are sorted, disjoint and not touching; columns it doesn't need are (0, 0).
"""

from __future__ import annotations

import numba as nb
import numpy as np

SHORT = 16
"""Rows with more ranges than this are sorted before they are merged."""


def normalise(ranges: np.ndarray) -> np.ndarray:
    """The normal form of any ranges: int32[L, R', 2] with R' at least 1 and at most R."""
    if ranges.shape[1] > SHORT:
        order = np.argsort(ranges[:, :, 0], axis=1, kind="stable")
        ranges = np.take_along_axis(ranges, order[:, :, None], axis=1)
    out, columns = _normalise(np.ascontiguousarray(ranges, np.int32))
    return np.ascontiguousarray(out[:, : max(columns, 1)])


@nb.njit(cache=True)
def _normalise(ranges):
    length, width = ranges.shape[0], ranges.shape[1]
    out = np.zeros((length, max(width, 1), 2), np.int32)
    columns = 0
    for i in range(length):
        kept = 0
        for c in range(width):  # insertion sort by lo: rows are short, or sorted already
            lo, hi = ranges[i, c, 0], ranges[i, c, 1]
            if lo >= hi:
                continue
            place = kept
            while place > 0 and out[i, place - 1, 0] > lo:
                out[i, place, 0], out[i, place, 1] = out[i, place - 1, 0], out[i, place - 1, 1]
                place -= 1
            out[i, place, 0], out[i, place, 1] = lo, hi
            kept += 1
        merged = 0
        for c in range(kept):
            lo, hi = out[i, c, 0], out[i, c, 1]
            if merged > 0 and lo <= out[i, merged - 1, 1]:
                out[i, merged - 1, 1] = max(out[i, merged - 1, 1], hi)
            else:
                out[i, merged, 0], out[i, merged, 1] = lo, hi
                merged += 1
        out[i, merged:kept] = 0
        columns = max(columns, merged)
    return out, columns


def intersect_window(ranges: np.ndarray, window: int) -> np.ndarray:
    """Normalised ranges without the KV tokens at or before i - window.

    Only the past is cut, as Transformers does for causal layers: what a bidirectional mask sees ahead of a token stays.
    """
    first = np.arange(len(ranges), dtype=np.int32)[:, None] - np.int32(window - 1)
    cut = ranges.copy()
    cut[:, :, 0] = np.maximum(cut[:, :, 0], first)
    return normalise(cut)


def to_slices(ranges: np.ndarray) -> np.ndarray:
    """Cut normalised ranges into slices: runs of rows whose lo and hi each move by 0 or by 1 per row.

    Returns:
        int32[slices, 6]: (first row, last row + 1, lo and hi of the first row, slope of lo, slope of hi), sorted by
        first row, then lo. Every attended pair lies in exactly one slice.
    """
    columns = [_column_slices(np.ascontiguousarray(ranges[:, c])) for c in range(ranges.shape[1])]
    slices = np.concatenate(columns)
    return slices[np.lexsort((slices[:, 2], slices[:, 0]))]


def _column_slices(column: np.ndarray) -> np.ndarray:
    """Slices of one column, int32[L, 2] of (lo, hi)."""
    used = column[:, 0] < column[:, 1]
    step = np.diff(column, axis=0)
    joins = used[:-1] & used[1:] & np.all((step == 0) | (step == 1), axis=1)
    first = np.flatnonzero(_run_starts(used, joins, step))
    if not len(first):
        return np.zeros((0, 6), np.int32)
    # a run ends where the next one starts, or before the next unused row
    unused = np.append(np.flatnonzero(~used), len(column))
    last = np.minimum(np.append(first[1:], len(column)), unused[np.searchsorted(unused, first)])
    slopes = np.zeros((len(first), 2), np.int32)
    longer = last - first > 1
    slopes[longer] = step[first[longer]]
    return np.concatenate([first[:, None], last[:, None], column[first], slopes], axis=1).astype(np.int32)


@nb.njit(cache=True)
def _run_starts(used, joins, step):
    """bool[L]: whether a slice begins at this row. A run takes its slopes from its first two rows."""
    starts = np.zeros(len(used), np.bool_)
    since = -1
    for i in range(len(used)):
        if not used[i]:
            since = -1
            continue
        goes_on = since >= 0 and joins[i - 1]
        if goes_on and i - since > 1:
            goes_on = step[i - 1, 0] == step[since, 0] and step[i - 1, 1] == step[since, 1]
        if not goes_on:
            starts[i] = True
            since = i
    return starts
