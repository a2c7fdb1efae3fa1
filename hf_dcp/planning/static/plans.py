"""Rank plans of the static schemes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hf_dcp.config import DcpConfig
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.codec import digest_of
from hf_dcp.planning.items import Rectangles, device_items, make_rectangles
from hf_dcp.planning.plan import PASSES, Item, PassPlan, RankPlan, WindowPlan
from hf_dcp.planning.static.layout import Grid, cut, find_scheme, pad_batch
from hf_dcp.planning.static.rows import KV, DenseRows, Q
from hf_dcp.planning.static.transfers import Numbers, make_program, message_arrays
from hf_dcp.planning.tiles import Tiles, make_tiles
from hf_dcp.planning.uses import LocalRows, token_runs


@dataclass(frozen=True)
class StaticPlan:
    """A batch under a static scheme."""

    name: str
    batch: BatchSpec
    """The batch that the rank plans are for: the given one, padded as the scheme wants it."""
    grid: Grid
    rank_plans: tuple[RankPlan, ...]

    def rank(self, rank: int) -> RankPlan:
        return self.rank_plans[rank]

    def check(self) -> None:
        """Raise `hf_dcp.planning.check.PlanError` unless the rank plans compute the padded batch's attention exactly."""
        from hf_dcp.planning.check import check

        check(self.batch, self.rank_plans, minimal=False)


def plan_static(
    name: str,
    batch: BatchSpec,
    topology: Topology,
    shape: ModelShape,
    config: DcpConfig | None = None,
    *,
    team: int | None = None,
    inner: int | None = None,
    pad: bool = True,
) -> StaticPlan:
    """The rank plans of a static scheme as published.

    Args:
        name: a key of `SCHEMES`.
        config: only its ``reduce_dtype`` matters.
        team, inner: ranks that split the heads, and positions of an inner ring, for the schemes that have them; None:
            see `Grid.of`.
        pad: False: don't pad sequences, but cut them into chunks of unequal size.

    Raises:
        ValueError: for an unknown name, or a team or an inner ring that doesn't fit.
    """
    scheme = find_scheme(name)
    grid = Grid.of(scheme, topology, shape.kv_heads, team, inner)
    padded = pad_batch(batch, scheme, topology.world_size) if pad else batch
    blocks, owner = cut(padded, scheme, grid)
    rows = DenseRows(blocks, grid, LocalRows.of(blocks, owner, topology.world_size))
    tables = {which: message_arrays(rows, which) for which in PASSES}
    parts = [_window_plans(padded, rows, make_tiles(padded, blocks, window), tables) for window, _ in shape.windows]
    plans = [
        RankPlan(
            rank=rank,
            node_of_rank=topology.node_of_rank,
            digest=0,
            num_tokens=padded.num_tokens,
            shape=shape,
            head_groups=grid.team,
            reduce_dtype=(config or DcpConfig()).reduce_dtype or shape.dtype,
            token_runs=runs,
            windows=tuple(part[rank] for part in parts),
        )
        for rank, runs in enumerate(token_runs(blocks, owner, topology.world_size))
    ]
    digest = digest_of(plans)
    return StaticPlan(name, padded, grid, tuple(replace(plan, digest=digest) for plan in plans))


def _window_plans(
    batch: BatchSpec, rows: DenseRows, tiles: Tiles, tables: dict[str, list[dict[str, np.ndarray]]]
) -> list[WindowPlan]:
    rectangles = make_rectangles(batch, rows.blocks, tiles)
    step_of = _steps(rows.grid)
    numbers = Numbers(rows.grid)
    plans = []
    for rank in range(len(rows.local.count)):
        mine = np.flatnonzero(rows.position[tiles.q[rectangles.tile]] == rows.grid.index[rank, 0])
        kv_position = rows.position[tiles.kv[rectangles.tile[mine]]]
        step = step_of[rows.grid.index[rank, 0], kv_position]
        items, slices = device_items(_items(rows, tiles, rectangles, mine, rank), rectangles)
        programs: list[PassPlan] = [make_program(numbers, tables[which][rank], step) for which in PASSES]
        plans.append(
            WindowPlan(
                window=tiles.window,
                q_remote=rows.remote_runs(Q, rank),
                kv_remote=rows.remote_runs(KV, rank),
                items=items,
                slices=slices,
                forward=programs[0],
                backward=programs[1],
            )
        )
    return plans


def _steps(grid: Grid) -> np.ndarray:
    """The step in which a position computes with the KV of another: int32[positions, positions]."""
    step_of = np.empty((grid.positions, grid.positions), np.int32)
    home = np.arange(grid.positions)
    for step in range(grid.positions):
        step_of[grid.walk(home, step), home] = step
    return step_of


def _items(rows: DenseRows, tiles: Tiles, rectangles: Rectangles, mine: np.ndarray, rank: int) -> np.ndarray:
    """The items of one rank, for `device_items`: int32[items, 8]."""
    tile = rectangles.tile[mine]
    items = np.zeros((len(mine), len(Item)), np.int32)
    group = np.full(len(mine), rows.grid.index[rank, 1])
    on = np.full(len(mine), rank)
    for side, (interval, block) in enumerate(((rectangles.q, tiles.q[tile]), (rectangles.kv, tiles.kv[tile]))):
        begin, end = interval[mine].T
        offset = (begin - rows.blocks.start[block]) * rows.step(on, block)
        items[:, 2 * side] = rows.slot(side, on, block, group) + offset
        items[:, 2 * side + 1] = end - begin
        items[:, Item.Q_TOKEN + side] = begin
    items[:, Item.SLICE_BEGIN] = rectangles.mask[mine]
    return items
