"""The tiles of one sequence: a sweep over the ranges of its rows, compiled."""

from __future__ import annotations

import numba as nb
import numpy as np


@nb.njit(cache=True)
def _grown(array: np.ndarray, needed: int) -> np.ndarray:
    if needed <= len(array):
        return array
    larger = np.empty((max(needed, 2 * len(array)),) + array.shape[1:], array.dtype)
    larger[: len(array)] = array
    return larger


@nb.njit(cache=True)
def read_rows(ranges, first, last, gathered):
    """Union of the ranges of rows [first, last), sorted and disjoint, into ``gathered``; returns it and its length."""
    found = 0
    for column in range(ranges.shape[1]):
        lo, hi = -1, -1
        for row in range(first, last):
            begin, end = ranges[row, column, 0], ranges[row, column, 1]
            if begin >= end:
                continue
            if lo >= 0 and begin <= hi and end >= lo:  # rows next to each other mostly overlap: extend
                lo, hi = min(lo, begin), max(hi, end)
                continue
            if lo >= 0:
                gathered = _grown(gathered, found + 1)
                gathered[found, 0], gathered[found, 1] = lo, hi
                found += 1
            lo, hi = begin, end
        if lo >= 0:
            gathered = _grown(gathered, found + 1)
            gathered[found, 0], gathered[found, 1] = lo, hi
            found += 1
    merged = 0
    chains = gathered[:found].copy()
    for i in np.argsort(chains[:, 0], kind="mergesort"):
        if merged > 0 and chains[i, 0] <= gathered[merged - 1, 1]:
            gathered[merged - 1, 1] = max(gathered[merged - 1, 1], chains[i, 1])
        else:
            gathered[merged, 0], gathered[merged, 1] = chains[i, 0], chains[i, 1]
            merged += 1
    return gathered, merged


@nb.njit(cache=True)
def _attending_rows(ranges, first, last, block_of, head, link, runs):
    """For every KV block, the runs of rows of [first, last) whose ranges touch it, as linked lists from ``head``."""
    found = 0
    head[:] = -1
    for column in range(ranges.shape[1]):
        since, from_block, to_block = first, -1, -1
        for row in range(first, last + 1):
            new_from, new_to = -1, -1
            if row < last and ranges[row, column, 0] < ranges[row, column, 1]:
                new_from, new_to = block_of[ranges[row, column, 0]], block_of[ranges[row, column, 1] - 1]
            if row < last and new_from == from_block and new_to == to_block:
                continue
            if from_block >= 0:
                needed = found + to_block - from_block + 1
                runs, link = _grown(runs, needed), _grown(link, needed)
                for block in range(from_block, to_block + 1):
                    runs[found, 0], runs[found, 1] = since, row
                    link[found], head[block] = head[block], found
                    found += 1
            since, from_block, to_block = row, new_from, new_to
    return link, runs


@nb.njit(cache=True)
def _areas(ranges, first, last, block_of, cuts, area, whole):
    """Attended pairs between rows [first, last) and every KV block, into ``area``."""
    area[:] = 0
    whole[:] = 0
    for row in range(first, last):
        for column in range(ranges.shape[1]):
            lo, hi = ranges[row, column, 0], ranges[row, column, 1]
            if lo >= hi:
                continue
            a, b = block_of[lo], block_of[hi - 1]
            if a == b:
                area[a] += hi - lo
            else:
                area[a] += cuts[a + 1] - lo
                area[b] += hi - cuts[b]
                whole[a + 1] += 1
                whole[b] -= 1
    rows = 0
    for block in range(len(area)):
        rows += whole[block]
        area[block] += rows * (cuts[block + 1] - cuts[block])


@nb.njit(cache=True)
def _merged_list(first, link, runs, out, at):
    """Sort and merge one linked list of runs into ``out`` from row ``at``; returns how many came out."""
    count, node = 0, first
    while node >= 0:
        place = at + count
        while place > at and out[place - 1, 0] > runs[node, 0]:  # insertion: lists are short
            out[place, 0], out[place, 1] = out[place - 1, 0], out[place - 1, 1]
            place -= 1
        out[place, 0], out[place, 1] = runs[node, 0], runs[node, 1]
        count += 1
        node = link[node]
    kept = 1
    for i in range(at + 1, at + count):
        if out[i, 0] <= out[at + kept - 1, 1]:
            out[at + kept - 1, 1] = max(out[at + kept - 1, 1], out[i, 1])
        else:
            out[at + kept, 0], out[at + kept, 1] = out[i, 0], out[i, 1]
            kept += 1
    return kept


@nb.njit(cache=True)
def _list_length(first, link):
    count, node = 0, first
    while node >= 0:
        count += 1
        node = link[node]
    return count


@nb.njit(cache=True)
def sequence_tiles(ranges, cuts):
    """Tiles of one sequence: (q, kv, area, Q intervals per tile, Q intervals, KV intervals per tile, KV intervals)."""
    n, length = len(cuts) - 1, cuts[-1]
    block_of = np.empty(length, np.int64)
    for block in range(n):
        block_of[cuts[block] : cuts[block + 1]] = block
    tiles, q_rows, kv_rows = np.empty((1024, 5), np.int64), np.empty((1024, 2), np.int64), np.empty((1024, 2), np.int64)
    area, whole, head = np.empty(n, np.int64), np.empty(n + 1, np.int64), np.empty(n, np.int64)
    link, runs, read = np.empty(1024, np.int64), np.empty((1024, 2), np.int64), np.empty((1024, 2), np.int64)
    found = q_found = kv_found = 0
    for i in range(n):
        first, last = cuts[i], cuts[i + 1]
        _areas(ranges, first, last, block_of, cuts, area, whole)
        link, runs = _attending_rows(ranges, first, last, block_of, head, link, runs)
        read, read_count = read_rows(ranges, first, last, read)
        at = 0
        for j in range(n):
            if area[j] == 0:
                continue
            tiles = _grown(tiles, found + 1)
            q_rows = _grown(q_rows, q_found + _list_length(head[j], link) + 1)
            q_count = _merged_list(head[j], link, runs, q_rows, q_found)
            while read[at, 1] <= cuts[j]:
                at += 1
            kv_count, scan = 0, at
            while scan < read_count and read[scan, 0] < cuts[j + 1]:
                kv_rows = _grown(kv_rows, kv_found + kv_count + 1)
                kv_rows[kv_found + kv_count, 0] = max(read[scan, 0], cuts[j])
                kv_rows[kv_found + kv_count, 1] = min(read[scan, 1], cuts[j + 1])
                kv_count += 1
                scan += 1
            tiles[found, 0], tiles[found, 1], tiles[found, 2] = i, j, area[j]
            tiles[found, 3], tiles[found, 4] = q_count, kv_count
            found, q_found, kv_found = found + 1, q_found + q_count, kv_found + kv_count
    t = tiles[:found]
    return t[:, 0], t[:, 1], t[:, 2], t[:, 3], q_rows[:q_found].copy(), t[:, 4], kv_rows[:kv_found].copy()
