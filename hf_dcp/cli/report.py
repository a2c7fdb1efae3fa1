"""What `hf-dcp plan` says about a plan: numbers read off the rank plans, as JSON and as a table."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from hf_dcp.bench.planner_rivals import scheme_bytes
from hf_dcp.planning.batch import RowBytes
from hf_dcp.planning.bound import forward_bounds
from hf_dcp.planning.plan import Message, Plan
from hf_dcp.planning.planner import plan_batch
from hf_dcp.planning.simulate import PassTimes, Rates, item_areas, message_bytes, simulate
from hf_dcp.planning.static import SCHEMES

ROW_EXACT = {"ring": "ring", "zigzag": "zigzag", "head-ring": "head-ring"}
"""Static scheme -> the placement that puts tokens where it does."""
COSTED = ("forward", "backward", "backward_keep")


def plan_bytes(plan: Plan, which: str) -> dict[str, int]:
    """Bytes that all ranks send in one pass, every window times its layers.

    Args:
        which: ``"forward"``, ``"backward"`` or ``"backward_keep"``.
    """
    row_bytes = RowBytes.of(plan.shape, plan.head_groups, plan.config.reduce_dtype)
    node = plan.topology.node
    between = inside = 0
    device = np.zeros(plan.topology.world_size, np.int64)
    for rank_plan in plan.rank_plans:
        for part, (_, layers) in zip(rank_plan.windows, plan.shape.windows, strict=True):
            program = part.forward if which == "forward" else part.backward
            size = message_bytes(program, row_bytes, which) * layers
            device[rank_plan.rank] += size.sum()  # sent and received
            sent = program.messages[:, Message.INCOMING] == 0
            foreign = node[program.messages[:, Message.PEER]] != node[rank_plan.rank]
            between += int(size[sent & foreign].sum())
            inside += int(size[sent & ~foreign].sum())
    return {"inter_node_bytes": between, "intra_node_bytes": inside, "max_device_bytes": int(device.max())}


def imbalances(plan: Plan) -> tuple[float, float]:
    """(compute, tokens): max over devices / mean, idle devices included, windows weighted by their layers."""
    compute = np.zeros(plan.topology.world_size)
    tokens = np.zeros(plan.topology.world_size)
    for rank_plan in plan.rank_plans:
        tokens[rank_plan.rank] = rank_plan.num_local
        for part, (_, layers) in zip(rank_plan.windows, plan.shape.windows, strict=True):
            compute[rank_plan.rank] += layers * item_areas(part).sum()
    return _imbalance(compute), _imbalance(tokens)


def predicted(plan: Plan, rates: Rates) -> dict[str, PassTimes]:
    """Predicted times of forward and backward, every window times its layers."""
    backward = "backward" if plan.config.backward_kv == "refetch" else "backward_keep"
    result = {}
    for name, which in (("forward", "forward"), ("backward", backward)):
        calls = [(simulate(plan.rank_plans, which, rates, window), layers) for window, layers in plan.shape.windows]
        result[name] = _add(calls)
    return result


def plan_report(plan: Plan, cold_s: float, cpu_s: dict[str, float], sizes: list[int]) -> dict[str, Any]:
    """The JSON of `hf-dcp plan`, static schemes left out.

    Args:
        cold_s: seconds of the first planning, imports and compilation included.
        cpu_s: CPU seconds of a later planning by part.
        sizes: bytes of every serialised rank plan.
    """
    compute, tokens = imbalances(plan)
    times = predicted(plan, plan.config.rates)
    return {
        "tokens": plan.batch.num_tokens,
        "devices": plan.topology.world_size,
        "block_size": block_size(plan),
        "head_groups": plan.head_groups,
        "tiles": sum(len(part.q) for part in plan.tiles) * plan.head_groups,
        "digest": f"{plan.digest:016x}",
        "status": plan.score.status,
        "cold_s": cold_s,
        "planning_cpu_s": cpu_s,
        "placement": plan.placement.name,
        **{which: plan_bytes(plan, which) for which in COSTED},
        "compute_imbalance": compute,
        "token_imbalance": tokens,
        "limits": plan.score.limits,
        "divisions": {name: _divisions(part) for name, part in times.items()},
        "plan_bytes_per_rank": {"max": max(sizes), "total": sum(sizes)},
        "bound": dict(zip(("inter_node_bytes", "total_bytes"), forward_bounds(plan), strict=True)),
        "predicted": {
            "forward_s": times["forward"].total_s,
            "backward_s": times["backward"].total_s,
            "exposed_s": times["forward"].exposed_s + times["backward"].exposed_s,
        },
    }


def block_size(plan: Plan) -> int | dict[str, int]:
    """The block size, or the smallest and largest where sequences have their own."""
    largest = [int(plan.blocks.size[plan.blocks.sequence == s].max()) for s in range(len(plan.batch.lengths))]
    cut = [size for size, length in zip(largest, plan.batch.lengths, strict=True) if size < length] or largest
    return cut[0] if min(cut) == max(cut) else {"min": min(cut), "max": max(cut)}


def _divisions(times: PassTimes) -> dict[str, Any]:
    return {
        "compute_share": times.division_share,
        "bytes": times.division_bytes,
        "exposed_s": times.exposed_s,
    }


def _imbalance(load: np.ndarray) -> float:
    return float(load.max() / load.mean()) if load.any() else 1.0


def _add(calls: list[tuple[PassTimes, int]]) -> PassTimes:
    """Several attention calls, each so many times, one after the other."""
    compute = sum(times.compute_s * layers for times, layers in calls)
    length = max(len(times.division_share) for times, _ in calls)
    share, size = np.zeros(length), np.zeros(max(len(times.division_bytes) for times, _ in calls), np.int64)
    for times, layers in calls:
        share[: len(times.division_share)] += np.array(times.division_share) * (
            times.compute_s * layers / (compute or 1.0)
        )
        size[: len(times.division_bytes)] += np.array(times.division_bytes, np.int64) * layers
    return PassTimes(
        total_s=sum(times.total_s * layers for times, layers in calls),
        compute_s=compute,
        exposed_s=sum(times.exposed_s * layers for times, layers in calls),
        division_share=[float(x) for x in share],
        division_bytes=[int(x) for x in size],
    )


def static_schemes(plan: Plan) -> dict[str, dict[str, Any]]:
    """Bytes of static context parallelism on the plan's batch: as published, and with only the rows that are read.

    A scheme that doesn't fit the heads or the ranks is left out.
    """
    result: dict[str, dict[str, Any]] = {}
    for name in SCHEMES:
        with suppress(ValueError):
            result[name] = {"dense": scheme_bytes(name, plan.batch, plan.topology, plan.shape, plan.config)}
            row_exact = ROW_EXACT.get(name)
            if row_exact is not None:
                result[name]["row_exact"] = _row_exact(plan, row_exact)
    return result


def _row_exact(plan: Plan, placement: str) -> dict[str, Any]:
    same = plan_batch(plan.batch, plan.topology, plan.shape, plan.config.with_changes(placement=placement))
    return {**{which: plan_bytes(same, which) for which in COSTED}, "compute_imbalance": imbalances(same)[0]}
