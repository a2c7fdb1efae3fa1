"""From a placement to the plans of all ranks: rows used, routes, phases, messages, items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_dcp.config import DcpConfig
from hf_dcp.planning.batch import BatchSpec, ModelShape, RowBytes, Topology
from hf_dcp.planning.divisions import Trial
from hf_dcp.planning.items import device_items, make_items, make_rectangles
from hf_dcp.planning.links import Links
from hf_dcp.planning.messages import Timing, make_pass, pass_tables
from hf_dcp.planning.plan import PASSES, RankPlan, WindowPlan
from hf_dcp.planning.problem import costed_passes
from hf_dcp.planning.simulate import row_seconds, unit_flops
from hf_dcp.planning.tiles import Blocks, Tiles
from hf_dcp.planning.transfers import Transfers
from hf_dcp.planning.trials import Trials, schedule_by
from hf_dcp.planning.units import make_units
from hf_dcp.planning.uses import LocalRows, Uses, find_uses, remote_rows, token_runs

MOST_EFFORT, PAIR_EFFORT = 80_000, 8
"""Plans with more atoms of tiles than this, a pair of devices being as much work as so many, are scheduled without trials."""


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
    scheduler = _Scheduler.of(tiles, tile_device, q, kv, topology, shape, config)
    passes = []
    for name in PASSES:
        phase, timings = scheduler.schedule(name)
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


@dataclass(frozen=True)
class _Scheduler:
    """Divisions and exchanges of the passes of one window."""

    tile_device: np.ndarray
    tiles: Tiles
    transfers: Transfers
    """Without bytes."""
    counts: tuple[np.ndarray, np.ndarray]
    """Rows of every use, of Q and of KV."""
    topology: Topology
    shape: ModelShape
    config: DcpConfig

    @classmethod
    def of(
        cls,
        tiles: Tiles,
        tile_device: np.ndarray,
        q: Uses,
        kv: Uses,
        topology: Topology,
        shape: ModelShape,
        config: DcpConfig,
    ) -> _Scheduler:
        transfers = Transfers.of((q, kv), tiles, tile_device, topology)
        return cls(tile_device, tiles, transfers, (q.count, kv.count), topology, shape, config)

    def schedule(self, name: str) -> tuple[np.ndarray, tuple[Timing, Timing]]:
        """The phase of each (tile, group), int32[tiles, groups], and the exchanges of Q and KV rows."""
        shape, config, tiles, groups = self.shape, self.config, self.tiles, self.tile_device.shape[1]
        which = name if name == "forward" else costed_passes(config)[1]
        row_bytes, rates = RowBytes.of(shape, groups, config.reduce_dtype), config.rates
        transfers = self.transfers.carrying(self.counts, row_bytes.inputs(which), row_bytes.partials(which))
        links = Links.of(rates, self.topology, row_seconds(rates, groups, name))
        seconds = tiles.area * (unit_flops(shape, groups, name) / rates.device_flops)
        before = np.append(0, np.cumsum(tiles.q_rows.end - tiles.q_rows.begin))
        rows, blocks = np.diff(before[tiles.q_rows.ptr]), (tiles.q, tiles.kv)
        units = make_units(self.tile_device, seconds, rows, transfers, blocks, self.topology.world_size)
        sure = self._without_trials()
        if sure is not None:
            phase, arrive, leave = schedule_by(sure, transfers, units, links)
        else:
            trials = Trials(transfers, units, links, self.topology.node, config.divisions, config.seed)
            phase, arrive, leave = trials.best()
        num_q = transfers.num_q
        timings = Timing(arrive[:num_q], leave[:num_q]), Timing(arrive[num_q:], leave[num_q:])
        return phase.reshape(self.tile_device.shape), timings

    def _without_trials(self) -> Trial | None:
        """How divisions are cut where there is nothing to compare, or too much."""
        if len(self.transfers.kind) == 0:
            return Trial(1)
        atoms = len(self.tiles.q_atoms.tile_atom) + len(self.tiles.kv_atoms.tile_atom)
        effort = atoms * self.tile_device.shape[1] + PAIR_EFFORT * self.topology.world_size**2
        most = self.config.divisions
        return Trial(most, first=int(most > 2)) if effort > MOST_EFFORT else None
