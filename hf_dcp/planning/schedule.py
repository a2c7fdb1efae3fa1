"""From a placement to the plans of all ranks: rows used, routes, phases, messages, items."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_dcp.config import DcpConfig
from hf_dcp.planning.batch import BatchSpec, ModelShape, RowBytes, Topology
from hf_dcp.planning.divisions import assign_phases
from hf_dcp.planning.items import device_items, make_items, make_rectangles
from hf_dcp.planning.messages import Timing, make_pass, pass_tables
from hf_dcp.planning.plan import PASSES, RankPlan, WindowPlan
from hf_dcp.planning.tiles import Blocks, Tiles
from hf_dcp.planning.uses import LocalRows, Uses, find_uses, remote_rows, token_runs


def make_rank_plans(
    batch: BatchSpec,
    blocks: Blocks,
    tiles: Sequence[Tiles],
    block_device: np.ndarray,
    tile_device: Sequence[np.ndarray],
    topology: Topology,
    shape: ModelShape,
    config: DcpConfig,
) -> list[RankPlan]:
    """The plans of all ranks, their digests still 0.

    Args:
        tiles: one entry per window of ``shape``, and so in ``tile_device``.
        block_device: int32[blocks], the owner of every token block.
        tile_device: int32[tiles, groups] each, where every tile of a head group is computed.
    """
    local = LocalRows.of(blocks, block_device, topology.world_size)
    parts = [
        _window_plans(batch, blocks, part, device, local, topology, shape, config)
        for part, device in zip(tiles, tile_device, strict=True)
    ]
    return [
        RankPlan(
            rank=rank,
            node_of_rank=topology.node_of_rank,
            digest=0,
            num_tokens=batch.num_tokens,
            shape=shape,
            head_groups=tile_device[0].shape[1],
            reduce_dtype=config.reduce_dtype or shape.dtype,
            token_runs=runs,
            windows=tuple(part[rank] for part in parts),
        )
        for rank, runs in enumerate(token_runs(blocks, block_device, topology.world_size))
    ]


def _window_plans(
    batch: BatchSpec,
    blocks: Blocks,
    tiles: Tiles,
    tile_device: np.ndarray,
    local: LocalRows,
    topology: Topology,
    shape: ModelShape,
    config: DcpConfig,
) -> list[WindowPlan]:
    groups, world = tile_device.shape[1], topology.world_size
    row_bytes = RowBytes.of(shape, groups, config.reduce_dtype)
    costs = [sum(row_bytes.inputs(name)[side] + row_bytes.partials(name)[side] for name in PASSES) for side in (0, 1)]
    q = find_uses(tiles.q_atoms, tile_device, blocks, local, topology, costs[0])
    kv = find_uses(tiles.kv_atoms, tile_device, blocks, local, topology, costs[1])
    rectangles = make_rectangles(batch, blocks, tiles)
    table = make_items(rectangles, tiles, tile_device, blocks, local, (q, kv))
    begins = np.searchsorted(table.device, np.arange(world + 1))
    passes = []
    for name in PASSES:
        phase = _phases(tiles, tile_device, q, kv, costs, name == "backward", config.divisions, world)
        timings = (Timing.of(q, phase), Timing.of(kv, phase))
        tables = pass_tables(q, kv, timings, name == "backward", local, groups)
        item_phase = phase[table.tile, table.group]
        passes.append([make_pass(tables[r], item_phase[begins[r] : begins[r + 1]]) for r in range(world)])
    q_remote, kv_remote = remote_rows(q, world), remote_rows(kv, world)
    plans = []
    for rank in range(world):
        items, slices = device_items(table.rows[begins[rank] : begins[rank + 1]], rectangles)
        plans.append(
            WindowPlan(
                window=tiles.window,
                q_remote=q_remote[rank],
                kv_remote=kv_remote[rank],
                items=items,
                slices=slices,
                forward=passes[0][rank],
                backward=passes[1][rank],
            )
        )
    return plans


def _phases(
    tiles: Tiles,
    tile_device: np.ndarray,
    q: Uses,
    kv: Uses,
    costs: list[int],
    kv_returns: bool,
    divisions: int,
    world: int,
) -> np.ndarray:
    """The phase of each (tile, group): int32[tiles, groups]."""
    earliest = np.zeros(tile_device.shape, np.int8)
    returns = np.zeros(tile_device.shape, bool)
    for uses, has_returns in ((q, True), (kv, kv_returns)):
        hops = np.where(uses.via < 0, 1, 2).astype(np.int8)
        needed = uses.over_tiles(np.maximum, hops, len(tiles))
        earliest = np.maximum(earliest, needed)
        returns |= (needed > 0) & has_returns
    compute = np.repeat(tiles.area[:, None], tile_device.shape[1], 1)
    rows = _row_numbers(tiles, tile_device, q, kv, costs, world)
    d, c, e, r, n = (array.ravel() for array in (tile_device, compute, earliest, returns, rows))
    return assign_phases(d, c, e, r, n, divisions, world).reshape(tile_device.shape)


def _row_numbers(tiles: Tiles, tile_device: np.ndarray, q: Uses, kv: Uses, costs: list[int], world: int) -> np.ndarray:
    """A number for the rows that each (tile, group) reads on the side on which its device receives more bytes."""
    received = [
        np.bincount(uses.device, weights=uses.count, minlength=world) * cost
        for uses, cost in zip((q, kv), costs, strict=True)
    ]
    by_q = (received[0] > received[1])[tile_device]
    block = np.where(by_q, tiles.q[:, None], tiles.kv[:, None])
    return np.arange(tile_device.shape[1]) * (tiles.kv.max(initial=0) + tiles.q.max(initial=0) + 1) + block
