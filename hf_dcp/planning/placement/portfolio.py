"""The portfolio: structured seeds, a short refinement of each, a long one of the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hf_dcp.config import DcpConfig
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.limits import deal_by_node, deal_evenly, limits_nodes
from hf_dcp.planning.objective import Score, evaluate
from hf_dcp.planning.placement.auto import MANY_DEVICES, Outline, head_groups
from hf_dcp.planning.placement.chunks import cheapest_chunks, longest_chunks
from hf_dcp.planning.placement.copies import Copies, find_copies
from hf_dcp.planning.placement.named import solver_placement, static_placement
from hf_dcp.planning.placement.nodes import NodeSeed, node_seeds
from hf_dcp.planning.placement.pieces import sequence_pieces
from hf_dcp.planning.placement.refine import refine
from hf_dcp.planning.placement.rivals import promising_rivals
from hf_dcp.planning.placement.seeds import Seed, bisected, contiguous, dealt, laid, local_units
from hf_dcp.planning.placement.state import (
    Graph,
    State,
    cost_of,
    make_graph,
    make_state,
    penalty_of,
    within_limits,
)
from hf_dcp.planning.problem import Placement, Problem, build_problem
from hf_dcp.planning.static.layout import SCHEMES
from hf_dcp.planning.tiles import make_blocks, make_tiles

REPAIRS, REPAIR_EFFORT = 4, 300_000
"""What is above a limit at the end is worked on this often."""
MORE, PENALTY, FLOOR = 2, 4.0, 0.3
"""For more than `MANY_DEVICES` devices, searches for mixed lengths have this many times the effort, times devices over that.
Rows have many users there, so that limits press harder, by devices over that squared, and from the beginning."""
SMALL = 1500
"""A single sequence with at most so many tiles times head groups is a small problem."""
APART = 4.0
"""Where nodes can do without each other, bytes between them count so much more in the search: what they save is small."""
HOPELESS = 1.4
"""Contiguous chunks with more compute imbalance aren't refined."""
CHEAP = 1.1
"""A placement that costs at most this, in copies of all KV rows inside nodes, needs no search."""


@dataclass(frozen=True)
class Schedule:
    """How seeds are refined: all of them a little, the best of them more."""

    warmth: tuple[float, ...]
    """Temperatures; every seed is refined at each of them. A number that comes again is another random start."""
    floor: float
    """Lowest pressure of limits (see `refine`)."""
    rounds: tuple[tuple[int, int, float, float], ...]
    """How many are kept, effort, temperature relative to the seed's, patience."""


ALONE = Schedule((0.05, 0.05), 0.1, ((1, 6_500_000, 1.0, 0.8), (1, 3_500_000, 0.3, 0.9)))
"""For a single sequence, whose seeds are good as they are."""
SMALL_ALONE = Schedule((0.3,) * 10, 0.1, ((4, 400_000, 1.0, 0.8), (2, 900_000, 0.5, 0.9), (1, 2_000_000, 0.25, 0.9)))
"""The same where there are few tiles: then it pays to leave the seed behind, and to begin often."""
MIXED = Schedule((0.6,), 0.02, ((4, 210_000, 1.0, 0.8), (2, 850_000, 0.7, 0.9), (1, 2_300_000, 0.3, 0.9)))
"""For mixed lengths, whose seeds are many and uneven."""


@dataclass(frozen=True)
class Solution:
    """A placement, with the problem that it solves."""

    problem: Problem
    placement: Placement
    score: Score


def solve(batch: BatchSpec, topology: Topology, shape: ModelShape, config: DcpConfig) -> Solution:
    """Choose blocks and place them: a pure function of its arguments.

    Raises:
        ValueError: if settings don't fit the model.
    """
    if config.placement in SCHEMES:
        return _static(config.placement, batch, topology, shape, config)
    found = _search(batch, topology, shape, config, head_groups(batch, shape, config))
    if config.placement != "auto" or found.score.cost == 0:
        return found
    names = promising_rivals(batch, topology, shape, config, found.score.cost)
    rivals = [_static(name, batch, topology, shape, config) for name in names]
    return min([found, *rivals], key=lambda solution: solution.score.key)


def _static(name: str, batch: BatchSpec, topology: Topology, shape: ModelShape, config: DcpConfig) -> Solution:
    problem, placement = static_placement(batch, topology, shape, config.with_changes(placement=name))
    return Solution(problem, placement, evaluate(problem, placement))


def _search(batch: BatchSpec, topology: Topology, shape: ModelShape, config: DcpConfig, groups: int) -> Solution:
    copies = None
    if config.block_size == "auto" and config.placement == "auto":
        copies = find_copies(batch, topology)
    if copies is not None:
        return _expand(batch, topology, shape, config, copies, groups)
    if config.block_size != "auto":
        problem = _problem(batch, topology, shape, config, config.block_size, groups)
        return Solution(problem, *place(problem, config))
    outline = Outline(batch, config.token_tolerance, topology.world_size)
    if config.placement == "auto":
        coarse = max(1, batch.num_tokens // topology.world_size)
        problem = _problem(batch, topology, shape, config, outline.cut(coarse), groups)
        found = _scored(problem, "contiguous", *contiguous(problem, make_graph(problem)))
        if _is_cheap(problem, found[1]):
            chunks = [Solution(problem, *found), *_uneven(problem, outline, found[1].cost)]
            return min(chunks, key=lambda solution: solution.score.key)
    for size in outline.sizes(topology, groups, config):
        problem = _problem(batch, topology, shape, config, outline.cut(size), groups)
        if problem.limits.possible:
            break
    best = Solution(problem, *place(problem, config))
    if config.placement != "auto" or best.score.cost == 0:
        return best
    return min([best, *_uneven(problem, outline, best.score.cost)], key=lambda solution: solution.score.key)


def _uneven(problem: Problem, outline: Outline, most: float) -> list[Solution]:
    """Contiguous chunks that use the limits up, if they may cost less than ``most``."""
    batch, order = problem.batch, np.argsort(problem.topology.node, kind="stable").astype(np.int32)
    if len(batch.lengths) == 1:
        starts = longest_chunks(problem)
        if len(starts) == 0:
            return []
        devices = order[-len(starts) :]
    else:
        found = cheapest_chunks(problem)
        if found is None or found[2] >= most:
            return []
        starts, devices = found[:2]
        by_token = np.argsort(starts)
        starts, devices = starts[by_token], devices[by_token]
    points = np.unique(
        np.concatenate([starts, *(b + s for b, s in zip(outline.segments, batch.starts[:-1], strict=True))])
    )
    bounds = np.searchsorted(points, batch.starts)
    cut = [points[a:b] - first for a, b, first in zip(bounds[:-1], bounds[1:], batch.starts[:-1], strict=True)]
    finer = _problem(batch, problem.topology, problem.shape, problem.config, cut, problem.head_groups)
    owner = devices[np.searchsorted(starts, finer.blocks.start, side="right") - 1]
    return [Solution(finer, *_scored(finer, "contiguous, uneven", owner, local_units(finer, owner)))]


def _problem(
    batch: BatchSpec,
    topology: Topology,
    shape: ModelShape,
    config: DcpConfig,
    block_sizes: int | Sequence[int | np.ndarray],
    groups: int,
) -> Problem:
    blocks = make_blocks(batch, block_sizes)
    tiles = tuple(make_tiles(batch, blocks, window) for window, _ in shape.windows)
    return build_problem(batch, blocks, tiles, shape, groups, config, topology)


def _expand(
    batch: BatchSpec, topology: Topology, shape: ModelShape, config: DcpConfig, copies: Copies, groups: int
) -> Solution:
    """Solve one part of a batch of equal parts, and copy the solution."""
    part = _search(copies.batch, copies.topology, shape, config, groups)
    blocks, placement = part.problem.blocks, part.placement
    bounds = np.searchsorted(blocks.sequence, np.arange(len(copies.batch.lengths) + 1))
    starts = [
        blocks.start[a:b] - token for a, b, token in zip(bounds[:-1], bounds[1:], copies.batch.starts[:-1], strict=True)
    ]
    problem = _problem(batch, topology, shape, config, copies.expand_blocks(starts), groups)
    device = copies.expand(blocks.sequence, placement.block_device)
    tile_device = tuple(
        copies.expand(blocks.sequence[tiles.q], own)
        for tiles, own in zip(part.problem.tiles, placement.tile_device, strict=True)
    )
    whole = Placement(f"{copies.count} x {placement.name}", device, tile_device)
    return Solution(problem, whole, evaluate(problem, whole))


def place(problem: Problem, config: DcpConfig) -> tuple[Placement, Score]:
    """The best placement found for given blocks, and what it costs."""
    if config.placement != "auto":
        placement = solver_placement(problem, config)
        return placement, evaluate(problem, placement)
    graph = make_graph(problem)
    found = _scored(problem, "contiguous", *contiguous(problem, graph))
    if _is_cheap(problem, found[1]):
        return found
    on_nodes = node_seeds(problem, graph, config.seed)
    seeds = _seeds(problem, graph, on_nodes)
    if found[1].compute_imbalance <= HOPELESS:
        seeds.append(("contiguous", contiguous(problem, graph)))
    alone = len(problem.batch.lengths) == 1
    schedule = MIXED if not alone else SMALL_ALONE if problem.num_tiles * problem.head_groups <= SMALL else ALONE
    times = 1
    if problem.world_size > MANY_DEVICES:
        times = 1 if alone else problem.world_size // MANY_DEVICES * MORE
        schedule = replace(schedule, floor=max(schedule.floor, FLOOR))
        graph = make_graph(problem, PENALTY * problem.world_size**2 / MANY_DEVICES**2)
    apart = graph._replace(node_cost=graph.node_cost * APART) if on_nodes[0].key == (False, 0.0) else graph
    name, state, seed = _refined(apart, seeds, schedule, config.seed * 1000, times)
    _repair(problem, graph, state, seed, times)
    return min(found, _scored(problem, name, state.owner, state.unit), key=lambda pair: pair[1].key)


def _refined(
    graph: Graph, seeds: list[tuple[str, Seed]], schedule: Schedule, first: int, times: int
) -> tuple[str, State, int]:
    """The best that a schedule finds from these seeds: (name of the seed, placement, random seed of its refinement)."""
    starts = [(name, seed, warmth) for warmth in schedule.warmth for name, seed in seeds]
    trials = [(name, make_state(graph, *seed), first + i, warmth) for i, (name, seed, warmth) in enumerate(starts)]
    for keep, effort, cooler, patience in schedule.rounds:
        ranked = []
        for name, state, seed, warmth in trials:
            refine(graph, state, times * effort, seed, cooler * warmth, patience=patience, floor=schedule.floor)
            ranked.append((cost_of(graph, state) + penalty_of(graph, state), (name, state, seed, warmth)))
        ranked.sort(key=lambda trial: trial[0])
        trials = [trial for _, trial in ranked[:keep]]
    return trials[0][:3]


def _repair(problem: Problem, graph: Graph, state: State, seed: int, times: int) -> None:
    """Bring a placement inside the limits: by refinement where that does it, else by dealing pieces evenly."""
    strict = make_graph(problem, penalty=100.0)
    for repair in range(REPAIRS):
        if within_limits(problem, state):
            return
        refine(strict, state, times * REPAIR_EFFORT, seed + repair + 1, patience=0.5)
    if within_limits(problem, state):
        return
    owner, unit, limits = state.owner, state.unit, problem.limits
    if state.tokens.max() > limits.tokens:
        owner = deal_evenly(problem.blocks.size, 1, problem.world_size)[:, 0]
    if state.work.max() > limits.compute or np.any(state.node_work > limits.node_compute):
        if limits_nodes(problem.config):
            unit = deal_by_node(problem.tile_work, problem.head_groups, problem.topology.node)
        else:
            unit = deal_evenly(problem.tile_work, problem.head_groups, problem.world_size)
    dealt_out = make_state(graph, owner, unit)
    refine(strict, dealt_out, times * REPAIR_EFFORT, seed)
    if not within_limits(problem, dealt_out):
        dealt_out = make_state(graph, owner, unit)
    for kept, new in zip(state, dealt_out, strict=True):
        kept[...] = new


def _is_cheap(problem: Problem, score: Score) -> bool:
    kv = problem.atom_weight[problem.atom_side == 1].sum() * problem.head_groups
    inside = score.cost - sum(
        (problem.topology.inter_cost - problem.topology.intra_cost) * p.inter_node for p in score.costed
    )
    return problem.limits.possible and score.excess == 0 and inside <= CHEAP * kv * problem.topology.intra_cost


def _scored(problem: Problem, name: str, owner: np.ndarray, unit: np.ndarray) -> tuple[Placement, Score]:
    placement = problem.placement(name, owner, unit)
    return placement, evaluate(problem, placement)


def _seeds(problem: Problem, graph: Graph, on_nodes: list[NodeSeed]) -> list[tuple[str, Seed]]:
    seeds: list[tuple[str, Seed]] = []
    pieces = sequence_pieces(problem)
    for name, _, _, state in on_nodes:
        block_node, unit_node = state.owner, state.unit
        seeds.append((f"{name}, bisected", bisected(problem, graph, unit_node, block_node)))
        if len(problem.batch.lengths) == 1:
            continue
        seeds.append((f"{name}, dealt", dealt(problem, graph, unit_node, block_node, pieces, 1.0)))
        seeds.append((f"{name}, laid by work", laid(problem, block_node, pieces, 1.0, True)))
        seeds.append((f"{name}, laid", laid(problem, block_node, pieces, 1.0, False)))
    return seeds
