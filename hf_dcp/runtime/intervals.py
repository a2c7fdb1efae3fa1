"""Sets of integers as half-open intervals."""

from __future__ import annotations

import numpy as np

Intervals = list[tuple[int, int]]
"""Half-open, sorted, disjoint and not touching."""


def merge(intervals: np.ndarray) -> Intervals:
    """Union of half-open intervals int64[n, 2]."""
    merged: list[list[int]] = []
    for begin, end in sorted(map(tuple, intervals.tolist())):
        if begin >= end:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return [(begin, end) for begin, end in merged]


def union(a: Intervals, b: Intervals) -> Intervals:
    return merge(np.array(a + b, np.int64).reshape(-1, 2))


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Points of a that are not in b."""
    left: Intervals = []
    for begin, end in a:
        for first, last in b:
            if last <= begin or first >= end:
                continue
            if begin < first:
                left.append((begin, first))
            begin = last
            if begin >= end:
                break
        if begin < end:
            left.append((begin, end))
    return left


def width(intervals: Intervals) -> int:
    return sum(end - begin for begin, end in intervals)
