"""Items: the rectangles that a device computes, and the slices that mask them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numba as nb
import numpy as np

from hf_dcp.masks import to_slices
from hf_dcp.planning.batch import BatchSpec
from hf_dcp.planning.plan import Item, Slice, expand_runs
from hf_dcp.planning.tiles import Blocks, Tiles
from hf_dcp.planning.uses import LocalRows, Uses


@dataclass(frozen=True)
class Rectangles:
    """Every tile as rectangles (run of Q rows) x (run of KV rows) that hold its attended elements."""

    tile: np.ndarray
    """int64[rectangles], ascending."""
    q: np.ndarray
    """int64[rectangles, 2]: first and last + 1 batch-global token."""
    kv: np.ndarray
    """int64[rectangles, 2]"""
    mask: np.ndarray
    """int64[rectangles]: index into ``slices_ptr`` of the slices of its Q rows; -1 if every element is attended to."""
    slices_ptr: np.ndarray
    """int64[masks + 1]"""
    slices: np.ndarray
    """int32[slices, 6], columns `Slice`, clipped to the Q rows."""


def make_rectangles(batch: BatchSpec, blocks: Blocks, tiles: Tiles) -> Rectangles:
    """Cut the tiles of one window into rectangles; rectangles without an attended element are left out."""
    q_count, kv_count = np.diff(tiles.q_rows.ptr), np.diff(tiles.kv_rows.ptr)
    tile = np.repeat(np.arange(len(tiles)), q_count * kv_count)
    within = expand_runs(np.zeros(len(tiles), np.int64), q_count * kv_count)
    qi, ki = tiles.q_rows.ptr[tile] + within // kv_count[tile], tiles.kv_rows.ptr[tile] + within % kv_count[tile]
    q = np.stack([tiles.q_rows.begin[qi], tiles.q_rows.end[qi]], 1)
    kv = np.stack([tiles.kv_rows.begin[ki], tiles.kv_rows.end[ki]], 1)
    area = tiles.area[tile].copy()
    sequence = blocks.sequence[tiles.q[tile]]
    for i in np.flatnonzero((q_count * kv_count > 1)[tile]):
        s = sequence[i]
        area[i] = _area(tiles.ranges[s], q[i] - batch.starts[s], kv[i] - batch.starts[s])
    kept = np.flatnonzero(area)
    tile, q, kv, area, sequence = tile[kept], q[kept], kv[kept], area[kept], sequence[kept]
    partial = np.flatnonzero(area != (q[:, 1] - q[:, 0]) * (kv[:, 1] - kv[:, 0]))
    mask = np.full(len(tile), -1)
    rows, mask[partial] = np.unique(np.append(q[partial], sequence[partial, None], 1), axis=0, return_inverse=True)
    slices_ptr, slices = _slices_of(batch, tiles, rows)
    return Rectangles(tile, q, kv, mask, slices_ptr, slices)


@nb.njit(cache=True)
def _area(ranges, q, kv):
    area = 0
    for row in range(q[0], q[1]):
        for column in range(ranges.shape[1]):
            area += max(0, min(ranges[row, column, 1], kv[1]) - max(ranges[row, column, 0], kv[0]))
    return area


def _slices_of(batch: BatchSpec, tiles: Tiles, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The slices of each run of query rows (first, last + 1, sequence), in batch-global tokens."""
    known: dict[int, np.ndarray] = {}
    parts = [np.zeros((0, len(Slice)), np.int32)]
    ptr = [np.zeros(1, np.int64)]
    bounds = np.flatnonzero(np.diff(rows[:, 2], prepend=-1, append=-1))
    for begin, end in itertools.pairwise(bounds):
        s = rows[begin, 2]
        ranges = tiles.ranges[s]
        if id(ranges) not in known:  # equal sequences share one array
            known[id(ranges)] = to_slices(ranges)
        counts, clipped = _clipped(known[id(ranges)], rows[begin:end, :2] - batch.starts[s])
        parts.append(clipped + np.array([batch.starts[s]] * 4 + [0, 0], np.int32))
        ptr.append(ptr[-1][-1] + np.cumsum(counts))
    return np.concatenate(ptr), np.concatenate(parts).astype(np.int32)


@nb.njit(cache=True)
def _clipped(slices, rows):
    """The part of the slices, which are sorted, in each run [first, last) of query rows: (count of each, slices)."""
    counts, out, found = np.zeros(len(rows), np.int64), np.empty((1024, 6), np.int32), 0
    for r in range(len(rows)):
        first, last = rows[r, 0], rows[r, 1]
        begun = found
        for s in range(np.searchsorted(slices[:, 0], last)):
            if slices[s, 1] <= first:
                continue
            if found == len(out):
                out = np.concatenate((out, np.empty_like(out)))
            cut = max(first - slices[s, 0], 0)
            out[found] = slices[s]
            out[found, 0] += cut
            out[found, 1] = min(slices[s, 1], last)
            out[found, 2] += cut * slices[s, 4]
            out[found, 3] += cut * slices[s, 5]
            found += 1
        counts[r] = found - begun
    return counts, out[:found]


@dataclass(frozen=True)
class ItemTable:
    """The items of all devices, sorted by (device, group, Q row, KV row)."""

    device: np.ndarray
    """int32[items]"""
    tile: np.ndarray
    """int64[items]"""
    group: np.ndarray
    """int32[items]"""
    rows: np.ndarray
    """int32[items, 8], columns `Item`; the slice columns hold the index of the mask, see `device_items`."""


def make_items(
    rectangles: Rectangles,
    tiles: Tiles,
    tile_device: np.ndarray,
    blocks: Blocks,
    local: LocalRows,
    uses: tuple[Uses, Uses],
) -> ItemTable:
    """One item per rectangle and head group, with the slots that its rows have on its device."""
    groups = tile_device.shape[1]
    rectangle = np.repeat(np.arange(len(rectangles.tile)), groups)
    group = np.tile(np.arange(groups, dtype=np.int32), len(rectangles.tile))
    tile = rectangles.tile[rectangle]
    device = tile_device[tile, group]
    order = np.lexsort((rectangles.kv[rectangle, 0], rectangles.q[rectangle, 0], group, device))
    rectangle, group, tile, device = rectangle[order], group[order], tile[order], device[order]
    rows = np.zeros((len(order), len(Item)), np.int32)
    sides = ((rectangles.q, tiles.q, tiles.q_atoms), (rectangles.kv, tiles.kv, tiles.kv_atoms))
    for side, (interval, block_of_tile, atoms) in enumerate(sides):
        begin, end = interval[rectangle].T
        block = block_of_tile[tile]
        atom = np.searchsorted(atoms.begin, begin)  # a rectangle begins where an atom does
        key = (device.astype(np.int64) * groups + group) * len(atoms.begin) + atom
        slot = uses[side].first_slot(key, local.slot(block, begin - blocks.start[block], group, groups))
        rows[:, 2 * side] = slot
        rows[:, 2 * side + 1] = end - begin
        rows[:, Item.Q_TOKEN + side] = begin
    rows[:, Item.SLICE_BEGIN] = rectangles.mask[rectangle]
    return ItemTable(device, tile, group, rows)


def device_items(rows: np.ndarray, rectangles: Rectangles) -> tuple[np.ndarray, np.ndarray]:
    """The item table of one device with its own slices: (items, slices)."""
    rows = rows.copy()
    mask = rows[:, Item.SLICE_BEGIN]
    partial = mask >= 0
    used, number = np.unique(mask[partial], return_inverse=True)
    count = rectangles.slices_ptr[used + 1] - rectangles.slices_ptr[used]
    end = np.cumsum(count)
    rows[:, Item.SLICE_BEGIN] = rows[:, Item.SLICE_END] = 0
    rows[partial, Item.SLICE_BEGIN] = (end - count)[number]
    rows[partial, Item.SLICE_END] = end[number]
    return rows, rectangles.slices[expand_runs(rectangles.slices_ptr[used], count)]
