"""The planner benchmark: bytes, balance and CPU seconds of plans of many batches, next to what they are compared with.

It only plans: nothing is executed, and torch isn't needed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hf_dcp.bench.batches import Named, with_mask
from hf_dcp.bench.planner_rivals import best_rivals, ratio, rivals, score_bytes
from hf_dcp.config import DcpConfig
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.bound import forward_bounds
from hf_dcp.planning.plan import Plan
from hf_dcp.planning.planner import plan_batch
from hf_dcp.planning.tiles import make_tiles

PARTS = ("tiles", "placement", "schedule", "serialise")


@dataclass(frozen=True)
class PlannerSettings:
    """
    Args:
        against: rivals, of `hf_dcp.bench.planner_rivals.RIVALS`.
        repeats: plannings of each batch that count; CPU seconds are their medians.
        warmup: plannings of each batch before them.
    """

    topology: Topology
    shape: ModelShape
    config: DcpConfig
    against: tuple[str, ...]
    repeats: int = 3
    warmup: int = 1

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"--repeats must be an integer of at least 1, not {self.repeats}")
        if self.warmup < 0:
            raise ValueError(f"--warmup must be an integer of at least 0, not {self.warmup}")


@dataclass(frozen=True)
class TimedPlan:
    """A plan, the serialised plan of each rank, and how long planning took."""

    plan: Plan
    payloads: list[bytes]
    first_s: float
    """Wall seconds of the first planning, compilation included if it was still to be done."""
    cpu_s: dict[str, float]
    """CPU seconds by `PARTS`, and their "total": medians of the plannings that count."""


def timed_plan(
    batch: BatchSpec, topology: Topology, shape: ModelShape, config: DcpConfig, repeats: int, warmup: int
) -> TimedPlan:
    """Plan and serialise ``warmup + repeats`` times."""
    began, first_s, runs = time.perf_counter(), 0.0, []
    for run in range(warmup + repeats):
        plan = plan_batch(batch, topology, shape, config)
        before = time.process_time()
        payloads = [rank_plan.to_bytes() for rank_plan in plan.rank_plans]
        runs.append(_cpu_seconds(plan, time.process_time() - before))
        if run == 0:
            first_s = time.perf_counter() - began
    cpu_s = {part: statistics.median(run[part] for run in runs[warmup:]) for part in runs[0]}
    return TimedPlan(plan, payloads, first_s, cpu_s)


def _cpu_seconds(plan: Plan, serialise: float) -> dict[str, float]:
    """CPU seconds by part. Placement also makes tiles, for every block size that it tries: those of the chosen one are
    timed apart and taken out."""
    parts = {"tiles": 0.0, **plan.cpu_s}
    if "tiles" not in plan.cpu_s:
        before = time.process_time()
        for window, _ in plan.shape.windows:
            make_tiles(plan.batch, plan.blocks, window)
        parts["tiles"] = min(time.process_time() - before, parts["placement"])
        parts["placement"] -= parts["tiles"]
    parts["serialise"] += serialise
    return {**parts, "total": sum(parts.values())}


def bench_planner(batches: Sequence[Named], masks: Sequence[str], settings: PlannerSettings) -> dict[str, Any]:
    """Plan every batch under every mask: the report."""
    cases = [(mask, name, with_mask(lengths, mask)) for mask in masks for name, lengths in batches]
    shape = settings.shape
    return {
        "node_of_rank": list(settings.topology.node_of_rank),
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "dtype": shape.dtype,
        "backward_kv": settings.config.backward_kv,
        "repeats": settings.repeats,
        "results": list(_results(cases, settings)),
    }


def _results(cases: Sequence[tuple[str, str, BatchSpec]], settings: PlannerSettings) -> Iterator[dict[str, Any]]:
    for number, (mask, name, batch) in enumerate(cases):
        if len(cases) > 1:
            print(f"batch {name}, {mask}: {number + 1} of {len(cases)}", file=sys.stderr, flush=True)
        yield {"mask": mask, "batch": name, **plan_one(batch, settings)}


def plan_one(batch: BatchSpec, settings: PlannerSettings) -> dict[str, Any]:
    """The entry of one batch in the report."""
    timed = timed_plan(batch, settings.topology, settings.shape, settings.config, settings.repeats, settings.warmup)
    plan, score = timed.plan, timed.plan.score
    sent = score_bytes(score)
    bound = dict(zip(("inter_node_bytes", "total_bytes"), forward_bounds(plan), strict=True))
    forward = sent["forward"]["inter_node_bytes"] + sent["forward"]["intra_node_bytes"]
    against = rivals(plan, settings.against)
    return {
        "lengths": list(batch.lengths),
        "tokens": batch.num_tokens,
        "placement": plan.placement.name,
        "head_groups": plan.head_groups,
        "blocks": len(plan.blocks),
        "tiles": sum(len(tiles) for tiles in plan.tiles),
        "digest": f"{plan.digest:016x}",
        **sent,
        "cost": score.cost,
        "compute_imbalance": score.compute_imbalance,
        "token_imbalance": score.token_imbalance,
        "limits": score.limits,
        "status": score.status,
        "excess": score.excess,
        "planning_cpu_s": timed.cpu_s,
        "plan_bytes_per_rank": {"max": max(map(len, timed.payloads)), "total": sum(map(len, timed.payloads))},
        "bound": bound,
        "ratio_to_bound": ratio(forward, bound["total_bytes"]),
        "against": against,
        "best": best_rivals(against),
    }
