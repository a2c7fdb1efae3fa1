"""Tile lists: what a GPU kernel walks over in one division.

The attended pairs of a division, cut to a grid: the Q rows of a head group into **Q blocks** of ``tokens`` places, the KV
rows into **KV blocks** of ``columns`` places (places: see `hf_dcp.runtime.calls`; a block never leaves a run of
places). A **tile** is a pair of blocks with an attended element. It is *full* if both blocks have full size and every
element is attended to; a kernel then needs no mask arithmetic. Otherwise it has **ranges**: one half-open interval of
columns for every row. A tile whose rows attend to several intervals is listed several times, each time with a range of its
own: disjoint parts of a row merge like any others. So ranges state any mask whatsoever, and a kernel compares only twice.

The same tiles are listed twice: by Q block (forward, dQ) and by KV block (dK and dV). So every row of an accumulator
belongs to one program of a kernel, which needs no atomics and gives the same bits every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hf_dcp.planning.plan import RankPlan, WindowPlan, expand_runs
from hf_dcp.runtime.calls import pieces_by_group
from hf_dcp.runtime.intervals import merge
from hf_dcp.runtime.pieces import C0, C1, HI, HS, LO, LS, R0, R1

BLOCK_FIELDS = 6
"""Of a block: first place, places, head group, first entry, first masked entry, end of its entries."""
ENTRY_FIELDS = 3
"""Of an entry: first place and places of the block on the other side, and the range, -1 for a full tile."""


@dataclass(frozen=True)
class TileList:
    """The tiles of some items of one rank plan, by Q block and by KV block."""

    tokens: int
    columns: int
    q_blocks: np.ndarray
    """int32[Q blocks, 6], the heaviest first."""
    q_entries: np.ndarray
    """int32[entries, 3]: the full tiles of a block before its masked ones, in the order of columns."""
    kv_blocks: np.ndarray
    """int32[KV blocks, 6]"""
    kv_entries: np.ndarray
    """int32[entries, 3]"""
    ranges: np.ndarray
    """int32[ranges, tokens, 2]: (lo, hi) of every row of a Q block, counted from the first column of the KV block."""

    @property
    def entries(self) -> int:
        return len(self.q_entries)

    @property
    def full(self) -> int:
        """Tiles without a mask."""
        return int((self.q_blocks[:, 4] - self.q_blocks[:, 3]).sum())


def build_tile_list(plan: RankPlan, part: WindowPlan, order: np.ndarray, tokens: int, columns: int) -> TileList:
    """The tile list of the items ``order`` (indices) of one window.

    Args:
        tokens: places of a Q block.
        columns: places of a KV block.
    """
    grids, found = [], []
    q_count = kv_count = 0
    for group, pieces in pieces_by_group(plan, part, np.asarray(order, np.int64)):
        pieces = pieces[(pieces[:, R0] < pieces[:, R1]) & (pieces[:, C0] < pieces[:, C1])]
        q = _grid(pieces[:, [R0, R1]], tokens)
        kv = _grid(pieces[:, [C0, C1]], columns)
        parts = _Cut(pieces, q, kv, tokens, columns).parts()
        parts[:, 0] += q_count
        parts[:, 1] += kv_count
        q_count, kv_count = q_count + len(q), kv_count + len(kv)
        grids.append(tuple(np.column_stack([side, np.full(len(side), group)]) for side in (q, kv)))
        found.append((parts, pieces))
    return _listed(grids, found, tokens, columns)


def _grid(intervals: np.ndarray, size: int) -> np.ndarray:
    """Blocks of at most ``size`` places over the union of intervals: int64[blocks, 2], first place and places."""
    runs = np.array(merge(intervals), np.int64).reshape(-1, 2)
    count = -(-(runs[:, 1] - runs[:, 0]) // size)
    first = expand_runs(runs[:, 0], count, size)
    return np.column_stack([first, np.minimum(np.repeat(runs[:, 1], count) - first, size)])


@dataclass(frozen=True)
class _Cut:
    """Pieces of one head group cut by the grid."""

    pieces: np.ndarray
    q: np.ndarray
    kv: np.ndarray
    tokens: int
    columns: int

    def parts(self) -> np.ndarray:
        """int64[parts, 4]: (Q block, KV block, piece, whether the piece covers the tile), for all that may overlap."""
        q, piece = self._overlaps(self.q, self.pieces[:, R0], self.pieces[:, R1])
        p = self.pieces[piece]
        begin = np.maximum(p[:, R0], self.q[q, 0])
        last = np.minimum(p[:, R1], self.q[q].sum(1)) - 1
        lo_min, lo_max = (np.maximum(p[:, LO] + (row - p[:, R0]) * p[:, LS], p[:, C0]) for row in (begin, last))
        hi_min, hi_max = (np.minimum(p[:, HI] + (row - p[:, R0]) * p[:, HS], p[:, C1]) for row in (begin, last))
        kv, pair = self._overlaps(self.kv, lo_min, np.maximum(hi_max, lo_min))
        q, piece, p = q[pair], piece[pair], p[pair]
        first, size = self.kv[kv, 0], self.kv[kv, 1]
        rows = (last - begin + 1)[pair] == self.tokens
        inside = (lo_max[pair] <= first) & (hi_min[pair] >= first + size)
        return np.column_stack([q, kv, piece, rows & inside & (size == self.columns)])

    @staticmethod
    def _overlaps(blocks: np.ndarray, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(block, interval) of all that overlap; the blocks are sorted and cover the intervals."""
        first = np.searchsorted(blocks[:, 0], begin, side="right") - 1
        count = np.where(begin < end, np.searchsorted(blocks[:, 0], end, side="left") - first, 0)
        return expand_runs(first, count), np.repeat(np.arange(len(begin)), count)


def _listed(grids: list, found: list, tokens: int, columns: int) -> TileList:
    """Tiles from the parts of all head groups."""
    if not found:
        none = np.zeros((0, BLOCK_FIELDS), np.int32), np.zeros((0, ENTRY_FIELDS), np.int32)
        return TileList(tokens, columns, *none, *none, np.zeros((0, tokens, 2), np.int32))
    q, kv = (np.concatenate([grid[side] for grid in grids]) for side in range(2))
    shift = np.cumsum([0] + [len(pieces) for _, pieces in found[:-1]])
    parts = np.concatenate([part + np.array([0, 0, by, 0]) for (part, _), by in zip(found, shift)])
    pieces = np.concatenate([pieces for _, pieces in found])
    covered = parts[parts[:, 3] == 1]
    full = np.column_stack([covered[:, :2], np.zeros((len(covered), 2), np.int64)])
    masked, ranges = _masked(parts[parts[:, 3] == 0], pieces, q, kv, tokens, columns)
    tiles = np.concatenate([full, masked])
    by_q, by_kv = _csr(tiles, q, kv, 0), _csr(tiles, kv, q, 1)
    return TileList(tokens, columns, *by_q, *by_kv, ranges)


def _masked(
    parts: np.ndarray, pieces: np.ndarray, q: np.ndarray, kv: np.ndarray, tokens: int, columns: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tiles that no single piece covers: int64[tiles, 4] (Q block, KV block, first range, end), and the ranges."""
    row = q[parts[:, 0], 0][:, None] + np.arange(tokens)
    p = pieces[parts[:, 2]][:, :, None]
    first = kv[parts[:, 1], 0][:, None]
    step = row - p[:, R0]
    lo = np.maximum(np.maximum(p[:, LO] + step * p[:, LS], p[:, C0]), first) - first
    hi = np.minimum(np.minimum(p[:, HI] + step * p[:, HS], p[:, C1]), first + kv[parts[:, 1], 1][:, None]) - first
    part, at = np.nonzero((row >= p[:, R0]) & (row < p[:, R1]) & (lo < hi))
    lo, hi = lo[part, at], hi[part, at]
    tile, number = np.unique(parts[:, 0] * len(kv) + parts[:, 1], return_inverse=True)
    number = number.reshape(-1)[part]
    # The how-manieth interval of its row in its tile: intervals of a row lie in different ranges.
    key = number * tokens + at
    order = np.lexsort((lo, key))
    key, number, at, lo, hi = (x[order] for x in (key, number, at, lo, hi))
    new = np.append(True, key[1:] != key[:-1]) if len(key) else np.zeros(0, bool)
    start = np.flatnonzero(new)
    rank = np.arange(len(key)) - np.repeat(start, np.diff(np.append(start, len(key))))
    count = np.zeros(len(tile), np.int64)
    np.maximum.at(count, number, rank + 1)
    area = np.bincount(number, hi - lo, len(tile)).astype(np.int64)
    whole = area == tokens * columns
    count[whole] = 0  # several pieces cover it together
    begin = np.cumsum(count) - count
    ranges = np.zeros((int(count.sum()), tokens, 2), np.int32)
    keep = ~whole[number]
    target = begin[number[keep]] + rank[keep]
    ranges[target, at[keep], 0], ranges[target, at[keep], 1] = lo[keep], hi[keep]
    used = area > 0
    begin = np.where(whole, 0, begin)
    return np.column_stack([tile // len(kv), tile % len(kv), begin, begin + count])[used], ranges


def _csr(tiles: np.ndarray, own: np.ndarray, other: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of one side with their entries: full tiles first, the heaviest block first."""
    masked = tiles[:, 2] < tiles[:, 3]
    order = np.lexsort((tiles[:, 1 - side], masked, tiles[:, side]))
    each = np.maximum(tiles[order, 3] - tiles[order, 2], 1)
    tiles, masked = np.repeat(tiles[order], each, axis=0), np.repeat(masked[order], each)
    ranges = np.where(masked, tiles[:, 2] + expand_runs(np.zeros(len(each)), each), -1)
    count = np.bincount(tiles[:, side], minlength=len(own))
    full = np.bincount(tiles[~masked, side], minlength=len(own))
    begin = np.cumsum(count) - count
    blocks = np.column_stack([own, begin, begin + full, begin + count])
    entries = np.column_stack([other[tiles[:, 1 - side], :2], ranges])
    heavy = np.argsort(-count, kind="stable")
    return blocks[heavy[count[heavy] > 0]].astype(np.int32), entries.astype(np.int32)
