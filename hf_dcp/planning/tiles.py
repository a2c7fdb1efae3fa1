"""Token blocks and tiles: a batch and its masks as the pieces that placement works with.

A **token block** is a run of tokens of one sequence that live on one device. A **tile** is a pair (query block, KV block)
in which some query attends to some key; it counts its attended elements and names exactly the rows it reads. **Atoms**
are runs of rows of a block that are wanted by the same tiles: with them, counting only rows that are read costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_dcp.masks import intersect_window
from hf_dcp.planning.batch import BatchSpec
from hf_dcp.planning.plan import expand_runs
from hf_dcp.planning.sequence_tiles import sequence_tiles


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
    windowed: dict[int, np.ndarray] = {}
    known: dict[tuple[int, bytes], tuple] = {}
    parts, all_ranges = [], []
    for s, (length, ranges) in enumerate(zip(batch.lengths, batch.ranges, strict=True)):
        token, block = batch.starts[s], first_block[s]
        cuts = np.append(blocks.start[block : first_block[s + 1]] - token, length)
        if id(ranges) not in windowed:  # equal sequences share one array
            windowed[id(ranges)] = ranges if window is None else intersect_window(ranges, window)
        all_ranges.append(windowed[id(ranges)])
        identity = (id(ranges), cuts.tobytes())
        if identity not in known:
            known[identity] = sequence_tiles(all_ranges[-1], cuts)
        parts.append((*known[identity], token, block))
    return _joined(parts, blocks, batch.num_tokens, window, tuple(all_ranges))


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
