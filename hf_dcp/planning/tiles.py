"""Token blocks and tiles: a batch and its masks as the pieces that placement works with.

A **token block** is a run of tokens of one sequence that live on one device. A **tile** is a pair (query block, KV block)
in which some query attends to some key; it counts its attended elements and names exactly the rows it reads. **Atoms**
are runs of rows of a block that are wanted by the same tiles: with them, counting only rows that are read costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba as nb
import numpy as np

from hf_dcp.masks import Mask, intersect_window, normalise
from hf_dcp.planning.batch import BatchSpec
from hf_dcp.planning.plan import expand_runs


@dataclass(frozen=True)
class Blocks:
    """Token blocks of a batch, ordered by their first token."""

    start: np.ndarray
    """int64[blocks]: batch-global first token."""
    size: np.ndarray
    """int64[blocks]: tokens."""
    sequence: np.ndarray
    """int32[blocks]: index of the sequence."""

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class Atoms:
    """Rows of one side (Q or KV) that are wanted by the same tiles, and the atoms of each tile."""

    begin: np.ndarray
    """int64[atoms]: batch-global first row."""
    end: np.ndarray
    """int64[atoms]"""
    block: np.ndarray
    """int32[atoms]: the token block that the rows belong to."""
    tile_ptr: np.ndarray
    """int64[tiles + 1]: tile t wants the atoms ``tile_atom[tile_ptr[t] : tile_ptr[t + 1]]``, in row order."""
    tile_atom: np.ndarray
    """int32[...]"""


@dataclass(frozen=True)
class Intervals:
    """For every tile, the runs of rows [begin, end) that it reads on one side."""

    ptr: np.ndarray
    """int64[tiles + 1]"""
    begin: np.ndarray
    """int64[intervals]: batch-global rows."""
    end: np.ndarray
    """int64[intervals]"""


@dataclass(frozen=True)
class Tiles:
    """All tiles of a batch for the layers of one sliding window, ordered by (query block, KV block)."""

    window: int | None
    q: np.ndarray
    """int32[tiles]: query block."""
    kv: np.ndarray
    """int32[tiles]: KV block."""
    area: np.ndarray
    """int64[tiles]: attended (query, key) pairs, for one query head."""
    q_rows: Intervals
    kv_rows: Intervals
    q_atoms: Atoms
    kv_atoms: Atoms
    ranges: tuple[np.ndarray, ...]
    """int32[length, R, 2] of each sequence: normalised KV ranges, in its own coordinates, the window applied."""

    def __len__(self) -> int:
        return len(self.q)


def make_blocks(batch: BatchSpec, block_size: int | Sequence[int | np.ndarray]) -> Blocks:
    """Cut every sequence into blocks.

    Args:
        block_size: tokens per block; or one entry per sequence: a size, or the ascending first tokens of its blocks
            (sequence coordinates, beginning with 0) for blocks of any sizes.

    Raises:
        ValueError: for a size below 1, a wrong number of entries, or starts that do not cut the sequence.
    """
    sizes = [block_size] * len(batch.lengths) if isinstance(block_size, int) else list(block_size)
    if len(sizes) != len(batch.lengths):
        raise ValueError(f"block_size has {len(sizes)} entries for {len(batch.lengths)} sequences")
    starts = [_starts(entry, length) for entry, length in zip(sizes, batch.lengths, strict=True)]
    counts = [len(s) for s in starts]
    start = np.concatenate([s + offset for s, offset in zip(starts, batch.starts[:-1], strict=True)])
    size = np.diff(np.append(start, batch.num_tokens))
    return Blocks(start, size, np.repeat(np.arange(len(counts), dtype=np.int32), counts))


def _starts(entry: int | np.ndarray, length: int) -> np.ndarray:
    if isinstance(entry, (int, np.integer)):
        if entry < 1:
            raise ValueError(f"block_size must be at least 1, not {entry}")
        return np.arange(0, length, entry, dtype=np.int64)
    starts = np.asarray(entry, np.int64)
    if len(starts) == 0 or starts[0] != 0 or starts[-1] >= length or np.any(np.diff(starts) < 1):
        raise ValueError(f"block starts must ascend from 0 and stay below the length {length}, not {starts.tolist()}")
    return starts


def make_tiles(batch: BatchSpec, blocks: Blocks, window: int | None = None) -> Tiles:
    """The tiles of a batch under these blocks, for layers with this sliding window.

    Equal sequences (length, mask, blocks) are computed once.
    """
    first_block = np.searchsorted(blocks.sequence, np.arange(len(batch.lengths) + 1))
    known_ranges: dict[Any, np.ndarray] = {}
    known_tiles: dict[Any, tuple] = {}
    parts, ranges = [], []
    for s, (length, mask) in enumerate(zip(batch.lengths, batch.masks, strict=True)):
        token, block = batch.starts[s], first_block[s]
        cuts = np.append(blocks.start[block : first_block[s + 1]] - token, length)
        identity = (length, mask.key(length))
        if identity not in known_ranges:
            known_ranges[identity] = _ranges(mask, length, window)
        ranges.append(known_ranges[identity])
        cut_identity = (*identity, cuts.tobytes())
        if cut_identity not in known_tiles:
            known_tiles[cut_identity] = _sequence_tiles(ranges[-1], cuts)
        parts.append((*known_tiles[cut_identity], token, block))
    return _joined(parts, blocks, batch.num_tokens, window, tuple(ranges))


def _ranges(mask: Mask, length: int, window: int | None) -> np.ndarray:
    ranges = normalise(mask.ranges(length))
    return ranges if window is None else intersect_window(ranges, window)


def _joined(parts: list, blocks: Blocks, num_tokens: int, window: int | None, ranges: tuple) -> Tiles:
    """Tiles of all sequences in one, in batch-global coordinates."""
    q, kv, area, q_count, q_rows, kv_count, kv_rows = (
        np.concatenate([part[i] + (part[8] if i < 2 else part[7] if i in (4, 6) else 0) for part in parts])
        for i in range(7)
    )
    sides = []
    for count, rows, block in ((q_count, q_rows, q), (kv_count, kv_rows, kv)):
        intervals = Intervals(np.concatenate([[0], np.cumsum(count)]), rows[:, 0], rows[:, 1])
        sides.append((intervals, _atoms(intervals, np.repeat(block, count), blocks, num_tokens)))
    return Tiles(
        window=window,
        q=q.astype(np.int32),
        kv=kv.astype(np.int32),
        area=area,
        q_rows=sides[0][0],
        kv_rows=sides[1][0],
        q_atoms=sides[0][1],
        kv_atoms=sides[1][1],
        ranges=ranges,
    )


def _atoms(intervals: Intervals, interval_block: np.ndarray, blocks: Blocks, num_tokens: int) -> Atoms:
    """Cut the rows at every end of an interval; what lies between two cuts is wanted by the same tiles."""
    cut = np.zeros(num_tokens + 1, bool)
    cut[intervals.begin] = True
    cut[intervals.end] = True
    cut[blocks.start] = True
    cut[num_tokens] = True
    points = np.flatnonzero(cut)
    index = np.cumsum(cut) - 1
    count = index[intervals.end] - index[intervals.begin]
    atom = expand_runs(index[intervals.begin], count)
    used = np.zeros(len(points) - 1, bool)
    used[atom] = True
    number = np.cumsum(used) - 1
    block = np.empty(len(points) - 1, np.int32)
    block[atom] = np.repeat(interval_block, count)
    per_tile = np.concatenate([[0], np.cumsum(count)])[intervals.ptr]
    return Atoms(points[:-1][used], points[1:][used], block[used], per_tile, number[atom].astype(np.int32))


@nb.njit(cache=True)
def _grown(array: np.ndarray, needed: int) -> np.ndarray:
    if needed <= len(array):
        return array
    larger = np.empty((max(needed, 2 * len(array)),) + array.shape[1:], array.dtype)
    larger[: len(array)] = array
    return larger


@nb.njit(cache=True)
def _read_rows(ranges, first, last, gathered):
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
def _sequence_tiles(ranges, cuts):
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
        read, read_count = _read_rows(ranges, first, last, read)
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
