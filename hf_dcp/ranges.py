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
    slices = _slices(ranges)
    return slices[np.lexsort((slices[:, 2], slices[:, 0]))]


@nb.njit(cache=True)
def _slices(ranges):
    """The slices of one column after the other. A slice takes its slopes from its first two rows."""
    out, count = np.empty((1024, 6), np.int32), 0
    for c in range(ranges.shape[1]):
        first = -1
        for i in range(len(ranges)):
            lo, hi = ranges[i, c, 0], ranges[i, c, 1]
            if lo >= hi:
                first = -1
                continue
            if first >= 0:
                slopes = lo - ranges[i - 1, c, 0], hi - ranges[i - 1, c, 1]
                if i == first + 1 and 0 <= slopes[0] <= 1 and 0 <= slopes[1] <= 1:
                    out[count - 1, 4], out[count - 1, 5] = slopes
                if i == out[count - 1, 1] and slopes[0] == out[count - 1, 4] and slopes[1] == out[count - 1, 5]:
                    out[count - 1, 1] = i + 1
                    continue
            if count == len(out):
                out = np.concatenate((out, np.empty_like(out)))
            first = i
            out[count, 0], out[count, 1], out[count, 2], out[count, 3] = i, i + 1, lo, hi
            out[count, 4:] = 0
            count += 1
    return out[:count]
