"""The portfolio: structured seeds, each refined, the best kept."""

from __future__ import annotations

import numpy as np

from hf_dcp.config import DcpConfig
from hf_dcp.planning.objective import Score, evaluate
from hf_dcp.planning.placement.refine import refine
from hf_dcp.planning.placement.state import make_graph, make_state
from hf_dcp.planning.problem import Placement, Problem


def place(problem: Problem, config: DcpConfig) -> tuple[Placement, Score]:
    """The best placement found, and what it costs: a pure function of its arguments."""
    world, size = problem.world_size, problem.blocks.size
    middle = np.cumsum(size) - (size + 1) // 2
    owner = (middle * world // size.sum()).astype(np.int32)
    unit = np.repeat(owner[problem.tile_q][:, None], problem.head_groups, 1)
    best = _scored(problem, "contiguous", owner, unit)
    graph = make_graph(problem)
    state = make_state(graph, owner, unit)
    refine(graph, state, 200_000, config.seed)
    return min(best, _scored(problem, "contiguous+refined", state.owner, state.unit), key=lambda pair: pair[1].key)


def _scored(problem: Problem, name: str, owner: np.ndarray, unit: np.ndarray) -> tuple[Placement, Score]:
    placement = problem.placement(name, owner, unit)
    return placement, evaluate(problem, placement)
