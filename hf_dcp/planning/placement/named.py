"""Placements that are asked for by name: static schemes under our byte rules, and single solvers."""

from __future__ import annotations

import numpy as np

from hf_dcp.config import DcpConfig
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.placement.hypergraph import PARTITIONERS, partitioned
from hf_dcp.planning.placement.refine import refine
from hf_dcp.planning.placement.state import make_graph, make_state
from hf_dcp.planning.problem import Placement, Problem, build_problem
from hf_dcp.planning.static.layout import Grid, cut, find_scheme
from hf_dcp.planning.tiles import Blocks, make_blocks, make_tiles

REPAIR_EFFORT = 4_000_000
"""Steps of the refinement that brings a partitioner's placement inside both limits."""


def static_placement(
    batch: BatchSpec, topology: Topology, shape: ModelShape, config: DcpConfig
) -> tuple[Problem, Placement]:
    """The chunks of a static scheme where it puts them, every tile at its queries; only rows that are read travel.

    Raises:
        ValueError: if ``head_groups`` doesn't let the scheme split the heads.
    """
    scheme = find_scheme(config.placement)
    grid = Grid.of(scheme, topology, shape.kv_heads)
    groups = grid.team if config.head_groups == "auto" else config.head_groups
    if shape.kv_heads % groups or groups % grid.team:
        raise ValueError(
            f"head_groups must divide the {shape.kv_heads} KV heads into a multiple of {grid.team} groups for placement "
            f'{config.placement}, which {groups} does not: leave it at "auto"'
        )
    blocks, device = _finer(batch, *cut(batch, scheme, grid), config)
    tiles = tuple(make_tiles(batch, blocks, window) for window, _ in shape.windows)
    problem = build_problem(batch, blocks, tiles, shape, groups, config, topology)
    member = np.arange(groups) * grid.team // groups
    position = grid.index[device, 0]
    tile_device = grid.ranks[position[problem.tile_q]][:, member]
    return problem, problem.placement(config.placement, device, tile_device)


def _finer(batch: BatchSpec, blocks: Blocks, device: np.ndarray, config: DcpConfig) -> tuple[Blocks, np.ndarray]:
    """The chunks cut further into blocks of ``config.block_size``, if that is a number."""
    if config.block_size == "auto":
        return blocks, device
    count = -(-blocks.size // config.block_size)
    chunk = np.repeat(np.arange(len(blocks)), count)
    within = np.arange(len(chunk)) - np.repeat(np.cumsum(count) - count, count)
    start = blocks.start[chunk] + within * config.block_size
    sequence = blocks.sequence[chunk]
    starts = [start[sequence == s] - batch.starts[s] for s in range(len(batch.lengths))]
    return make_blocks(batch, starts), device[chunk]


def solver_placement(problem: Problem, config: DcpConfig) -> Placement:
    """The placement of one general partitioner, repaired to meet both limits."""
    owner, unit = partitioned(problem, PARTITIONERS[config.placement], config.seed)
    graph = make_graph(problem)
    state = make_state(graph, owner.astype(np.int32), unit.astype(np.int32))
    refine(graph, state, REPAIR_EFFORT, config.seed, 0.1)
    return problem.placement(config.placement, state.owner, state.unit)
