"""Static schemes as rivals: what they cost, from the rows that their chunks read, without making tiles.

A static scheme computes every tile where its queries are, so that a sweep over the ranges of a sequence tells which rows every
device lacks. Only a scheme that could be better than what the search found is worth being built and scored.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from hf_dcp.config import DcpConfig
from hf_dcp.masks import intersect_window
from hf_dcp.planning.batch import BatchSpec, ModelShape, RowBytes, Topology
from hf_dcp.planning.limits import compute_tolerance
from hf_dcp.planning.problem import costed_passes, side_bytes
from hf_dcp.planning.sequence_tiles import read_rows
from hf_dcp.planning.static.layout import SCHEMES, Grid, cut

RIVALS = ("ring", "zigzag", "head-ring")
"""Static schemes that a plan is never worse than."""


def promising_rivals(
    batch: BatchSpec, topology: Topology, shape: ModelShape, config: DcpConfig, cost: int
) -> list[str]:
    """Those that are cheaper than ``cost`` and keep the compute limit, about.

    Args:
        cost: of what the search found, as in `hf_dcp.planning.objective.Score`.
    """
    found = []
    for name in RIVALS:
        grid = Grid.of(SCHEMES[name], topology, shape.kv_heads)
        splits = config.head_groups == "auto" or config.head_groups % grid.team == 0
        if splits and _could_win(name, grid, batch, topology, shape, config, cost):
            found.append(name)
    return found


def _could_win(
    name: str, grid: Grid, batch: BatchSpec, topology: Topology, shape: ModelShape, config: DcpConfig, cost: int
) -> bool:
    blocks, owner = cut(batch, SCHEMES[name], grid)
    users = grid.ranks[grid.index[owner, 0]]  # [chunks, team]: who computes each head group of a chunk
    row = RowBytes.of(shape, grid.team, config.reduce_dtype)
    price = np.array([side_bytes(row, one) for one in costed_passes(config)]).sum(0)
    prices = (topology.inter_cost - topology.intra_cost, topology.intra_cost)
    node, world = topology.node, topology.world_size
    first = np.searchsorted(blocks.sequence, np.arange(len(batch.lengths) + 1))
    known: dict[tuple[int, int | None, bytes], tuple[np.ndarray, float]] = {}
    work, total = np.zeros(world), 0.0
    longest_first = np.argsort([-length for length in batch.lengths], kind="stable")
    for window, layers in shape.windows:
        for s in longest_first:
            ranges, own = batch.ranges[s], slice(first[s], first[s + 1])
            cuts = np.append(blocks.start[own], batch.starts[s + 1]) - batch.starts[s]
            key = (id(ranges), window, cuts.tobytes())
            if key not in known:
                seen = ranges if window is None else intersect_window(ranges, window)
                known[key] = _load_and_cost(seen, cuts, users[own], owner[own], node, price, prices)
            load, bytes_of = known[key]
            work += load * layers
            total += bytes_of * layers
            if total >= cost:
                return False
    return bool(work.max() * world <= compute_tolerance(config) * work.sum() * (1 + 1e-9))


def _load_and_cost(
    ranges: np.ndarray,
    cuts: np.ndarray,
    users: np.ndarray,
    owner: np.ndarray,
    node: np.ndarray,
    price: np.ndarray,
    prices: tuple[int, int],
) -> tuple[np.ndarray, float]:
    """Work of every device for one sequence, in elements of a head group, and what its rows cost on the way.

    Args:
        users: int32[chunks, team], who computes each head group.
        owner: int32[chunks].
        price: bytes per (Q row, KV row).
        prices: cost per byte that reaches another node, on top, and another device.
    """
    area, queries, ptr, reads = _chunk_reads(ranges, cuts)
    load, cost = np.zeros(len(node)), 0.0
    for user in users.T:
        load += np.bincount(user, weights=area, minlength=len(node))
        for part, place in zip(prices, (node, np.arange(len(node))), strict=True):
            lacking = _rows_from_elsewhere(queries, ptr, reads, cuts, place[user], place[owner], len(node))
            cost += part * float(lacking @ price)
    return load, cost


@nb.njit(cache=True)
def _chunk_reads(ranges, cuts):
    """Of every chunk: attended elements of its rows, how many rows attend to anything, and what they read:
    (int64[chunks], int64[chunks], int64[chunks + 1], int64[reads, 2])."""
    chunks = len(cuts) - 1
    area, queries, ptr = np.zeros(chunks, np.int64), np.zeros(chunks, np.int64), np.zeros(chunks + 1, np.int64)
    gathered, reads = np.empty((1024, 2), np.int64), np.empty((0, 2), np.int64)
    for chunk in range(chunks):
        for row in range(cuts[chunk], cuts[chunk + 1]):
            queries[chunk] += ranges[row, 0, 0] < ranges[row, 0, 1]
            for c in range(ranges.shape[1]):
                area[chunk] += ranges[row, c, 1] - ranges[row, c, 0]
        gathered, found = read_rows(ranges, cuts[chunk], cuts[chunk + 1], gathered)
        reads = np.concatenate((reads, gathered[:found].copy()))
        ptr[chunk + 1] = len(reads)
    return area, queries, ptr, reads


@nb.njit(cache=True)
def _rows_from_elsewhere(queries, ptr, reads, cuts, user, owner, places):
    """(Q rows, KV rows) that places compute with and don't own, each counted once for every such place.

    Args:
        queries, ptr, reads: of `_chunk_reads`.
        user: int32[chunks], where the rows of a chunk are computed.
        owner: int32[chunks], where its tokens live.
    """
    lacking = np.zeros(2, np.int64)
    for chunk in range(len(user)):
        if user[chunk] != owner[chunk]:
            lacking[0] += queries[chunk]
    by_user = np.argsort(user, kind="mergesort")
    first = np.searchsorted(user[by_user], np.arange(places + 1))
    for place in range(places):
        own = np.empty((0, 2), np.int64)
        for chunk in by_user[first[place] : first[place + 1]]:
            own = np.concatenate((own, reads[ptr[chunk] : ptr[chunk + 1]]))
        end = 0
        for i in np.argsort(own[:, 0], kind="mergesort"):
            begin = max(end, own[i, 0])
            end = max(end, own[i, 1])
            if begin >= end:
                continue
            lacking[1] += end - begin
            for chunk in range(len(owner)):
                if owner[chunk] == place:
                    lacking[1] -= max(0, min(end, cuts[chunk + 1]) - max(begin, cuts[chunk]))
    return lacking
