"""From a batch to a plan: the steps in order, nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from hf_dcp.config import DcpConfig
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.codec import digest_of
from hf_dcp.planning.objective import evaluate
from hf_dcp.planning.placement import Placement, Solution, choose_layout, solve
from hf_dcp.planning.plan import Plan
from hf_dcp.planning.problem import Problem, build_problem, costed_passes
from hf_dcp.planning.schedule import make_rank_plans
from hf_dcp.planning.simulate import simulate
from hf_dcp.planning.tiles import make_blocks, make_tiles

EPSILONS = (0.10, 0.02)
"""What ``DcpConfig(epsilon="auto")`` chooses between: bytes first, or compute first."""
Solver = Callable[[Problem, DcpConfig], Placement]


def plan_batch(
    batch: BatchSpec,
    topology: Topology,
    shape: ModelShape,
    config: DcpConfig | None = None,
    *,
    solver: Solver | None = None,
) -> Plan:
    """Plan the attention of one batch: a pure function of its arguments and of the versions of package and solvers.

    Args:
        batch: lengths and masks of the sequences of one DCP group's batch.
        topology: the nodes of the group's ranks.
        shape: heads, types and sliding windows of the model.
        config: settings; the defaults if None.
        solver: a placement to use in place of the search of ``config.placement``.

    Raises:
        ValueError: if the settings don't fit the model (head groups that don't divide the KV heads, ...).
    """
    config = config or DcpConfig()
    if config.epsilon == "auto":
        return _fastest(
            [plan_batch(batch, topology, shape, config.with_changes(epsilon=e), solver=solver) for e in EPSILONS]
        )
    clock = _Clock()
    solution = (
        solve(batch, topology, shape, config) if solver is None else _solved(batch, topology, shape, config, solver)
    )
    problem, placement = solution.problem, solution.placement
    blocks, tiles = problem.blocks, problem.tiles
    clock.lap("placement")
    rank_plans = make_rank_plans(
        batch, blocks, tiles, placement.block_device, placement.tile_device, topology, shape, config
    )
    clock.lap("schedule")
    digest = digest_of(rank_plans)
    stamped = tuple(replace(plan, digest=digest) for plan in rank_plans)
    clock.lap("serialise")
    return Plan(batch, topology, shape, config, blocks, tiles, placement, solution.score, stamped, clock.laps)


def _fastest(plans: Sequence[Plan]) -> Plan:
    """The plan with the least predicted time of a step's attention; it has the CPU seconds of all."""
    spent: dict[str, float] = {}
    for plan in plans:
        for step, seconds in plan.cpu_s.items():
            spent[step] = spent.get(step, 0.0) + seconds
    return replace(min(plans, key=predicted_seconds), cpu_s=spent)


def predicted_seconds(plan: Plan) -> float:
    """Seconds of attention, forward and backward, of all layers, at the rates of the plan's config."""
    return sum(
        layers * simulate(plan.rank_plans, which, plan.config.rates, window).total_s
        for window, layers in plan.shape.windows
        for which in costed_passes(plan.config)
    )


def _solved(batch: BatchSpec, topology: Topology, shape: ModelShape, config: DcpConfig, solver: Solver) -> Solution:
    layout = choose_layout(batch, topology, shape, config)
    blocks = make_blocks(batch, layout.block_sizes)
    tiles = tuple(make_tiles(batch, blocks, window) for window, _ in shape.windows)
    problem = build_problem(batch, blocks, tiles, shape, layout.head_groups, config, topology)
    placement = solver(problem, config)
    return Solution(problem, placement, evaluate(problem, placement))


class _Clock:
    """CPU seconds of this process, by step."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._since = time.process_time()

    def lap(self, name: str) -> None:
        now = time.process_time()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._since
        self._since = now
