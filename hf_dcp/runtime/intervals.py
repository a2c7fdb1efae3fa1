"""Sets of integers as half-open intervals, int64[n, 2]: sorted, disjoint and not touching. Compiled."""

from __future__ import annotations

import numba as nb
import numpy as np


@nb.njit(cache=True)
def merge(intervals: np.ndarray) -> np.ndarray:
    """Union of any half-open intervals int64[n, 2], empty ones and overlapping ones included."""
    merged = np.empty((len(intervals), 2), np.int64)
    count = 0
    for i in np.argsort(intervals[:, 0]):
        begin, end = intervals[i, 0], intervals[i, 1]
        if begin >= end:
            continue
        if count and begin <= merged[count - 1, 1]:
            merged[count - 1, 1] = max(merged[count - 1, 1], end)
        else:
            merged[count, 0], merged[count, 1] = begin, end
            count += 1
    return merged[:count]


@nb.njit(cache=True)
def union(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return merge(np.concatenate((a, b)))


@nb.njit(cache=True)
def subtract(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Points of a that are not in b."""
    left = np.empty((len(a) + len(b), 2), np.int64)
    count = 0
    for i in range(len(a)):
        begin, end = a[i, 0], a[i, 1]
        for j in range(len(b)):
            first, last = b[j, 0], b[j, 1]
            if last <= begin or first >= end:
                continue
            if begin < first:
                left[count, 0], left[count, 1] = begin, first
                count += 1
            begin = last
            if begin >= end:
                break
        if begin < end:
            left[count, 0], left[count, 1] = begin, end
            count += 1
    return left[:count]


@nb.njit(cache=True)
def width(intervals: np.ndarray) -> int:
    return (intervals[:, 1] - intervals[:, 0]).sum()
