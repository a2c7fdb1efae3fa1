"""One batch under DCP and under every static scheme: bytes, balance, memory, and predicted times."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from hf_dcp.config import DcpConfig
from hf_dcp.planning.batch import BatchSpec, ModelShape, RowBytes, Topology
from hf_dcp.planning.plan import Plan, RankPlan
from hf_dcp.planning.planner import plan_batch
from hf_dcp.planning.simulate import Rates, item_areas, simulate
from hf_dcp.planning.static import SCHEMES, StaticPlan, dense_bytes, plan_static

DCP = "DCP"
ROW_EXACT = ("ring", "zigzag", "head-ring")
"""Static placements that also exist under our byte rules."""


@dataclass(frozen=True)
class Setting:
    """Everything about a batch but its sequences."""

    topology: Topology
    shape: ModelShape
    config: DcpConfig
    rates: Rates
    flops_per_token: int
    """Forward and backward of all but attention."""


@dataclass(frozen=True)
class Outcome:
    """One scheme on one batch; times and bytes are of all layers, forward and backward."""

    attention_s: float
    exposed_s: float
    """Of these, what attention takes beyond the compute of the busiest device."""
    other_s: float
    """Everything but attention, on the device with the most tokens."""
    inter_bytes: int
    intra_bytes: int
    device_bytes: int
    """Sent and received by the busiest device."""
    imbalance: float
    """Attention of the busiest device over the mean."""
    memory: int
    """Bytes of one layer's Q, K, V and output, and of the remote rows beside them, on the device with the most."""
    plan_s: float = 0.0
    """CPU seconds of planning."""

    @property
    def step_s(self) -> float:
        return self.attention_s + self.other_s


def outcomes(batch: BatchSpec, setting: Setting) -> dict[str, Outcome]:
    """Scheme -> its outcome: "DCP", the static schemes as published, and "... row-exact" ones. Schemes that don't fit
    the heads or the ranks are left out."""
    result = {DCP: _planned(batch, setting, "auto")}
    for name in SCHEMES:
        with suppress(ValueError):
            result[name] = _static(name, batch, setting)
            if name in ROW_EXACT:
                result[f"{name} row-exact"] = _planned(batch, setting, name)
    return result


def _planned(batch: BatchSpec, setting: Setting, placement: str) -> Outcome:
    config = setting.config.with_changes(placement=placement)
    plan = plan_batch(batch, setting.topology, setting.shape, config)
    passes = plan.score.costed
    attention_s, exposed_s = _times(plan, setting)
    return Outcome(
        attention_s,
        exposed_s,
        _other_s(plan, setting),
        inter_bytes=sum(p.inter_node for p in passes),
        intra_bytes=sum(p.intra_node for p in passes),
        device_bytes=sum(p.max_device for p in passes),
        imbalance=plan.score.compute_imbalance,
        memory=max(_memory(rank_plan) for rank_plan in plan.rank_plans),
        plan_s=sum(plan.cpu_s.values()),
    )


def _static(name: str, batch: BatchSpec, setting: Setting) -> Outcome:
    plan = plan_static(name, batch, setting.topology, setting.shape, setting.config)
    call = dense_bytes(name, batch, setting.topology, setting.shape, setting.config.reduce_dtype)
    passes = [call[which] for which in ("forward", _backward(setting.config))]
    layers = sum(layers for _, layers in setting.shape.windows)
    attention_s, exposed_s = _times(plan, setting)
    work = np.array([_work(rank_plan) for rank_plan in plan.rank_plans])
    return Outcome(
        attention_s,
        exposed_s,
        _other_s(plan, setting),
        inter_bytes=layers * sum(p["inter_node_bytes"] for p in passes),
        intra_bytes=layers * sum(p["intra_node_bytes"] for p in passes),
        device_bytes=layers * sum(p["max_device_bytes"] for p in passes),
        imbalance=float(work.max() / work.mean()) if work.any() else 1.0,
        memory=_ring_memory(plan),
    )


def _backward(config: DcpConfig) -> str:
    return "backward_keep" if config.backward_kv == "keep" else "backward"


def _times(plan: Plan | StaticPlan, setting: Setting) -> tuple[float, float]:
    """(attention, exposed) seconds of all layers, forward and backward."""
    total = exposed = 0.0
    for window, layers in setting.shape.windows:
        for which in ("forward", _backward(setting.config)):
            times = simulate(plan.rank_plans, which, setting.rates, window)
            total += layers * times.total_s
            exposed += layers * times.exposed_s
    return total, exposed


def _other_s(plan: Plan | StaticPlan, setting: Setting) -> float:
    most = max(rank_plan.num_local for rank_plan in plan.rank_plans)
    return most * setting.flops_per_token / setting.rates.device_flops


def _work(plan: RankPlan) -> float:
    layers = [count for _, count in plan.shape.windows]
    return float(sum(n * item_areas(part).sum() for n, part in zip(layers, plan.windows)))


def _rows(plan: RankPlan) -> RowBytes:
    return RowBytes.of(plan.shape, plan.head_groups, plan.reduce_dtype)


def _memory(plan: RankPlan) -> int:
    """Local rows, and all remote rows of the window with the most."""
    row = _rows(plan)
    local = plan.num_local * plan.head_groups * (2 * row.q + row.kv)
    remote = [
        int(part.q_remote[:, 1].sum()) * (row.q + row.partial_q + row.stat) + int(part.kv_remote[:, 1].sum()) * row.kv
        for part in plan.windows
    ]
    return local + max(remote)


def _ring_memory(plan: StaticPlan) -> int:
    """Local rows, those of the team for its heads, and the two shares of KV that a ring holds: at hand, and on its way."""
    first = plan.rank_plans[0]
    row, tokens = _rows(first), max(rank_plan.num_local for rank_plan in plan.rank_plans)
    local = tokens * plan.grid.team * (2 * row.q + row.kv)
    team = tokens * plan.grid.team * (2 * row.q + row.kv) if plan.grid.team > 1 else 0
    return local + team + (2 * tokens * plan.grid.team * row.kv if plan.grid.positions > 1 else 0)


def evaluate(work: tuple[Sequence[int], str, Setting]) -> dict[str, Outcome]:
    """`outcomes` of lengths and a mask as text: what a worker process is given."""
    from hf_dcp.bench.batches import with_mask

    lengths, mask, setting = work
    return outcomes(with_mask(lengths, mask), setting)


def evaluate_all(
    batches: Sequence[Sequence[int]], mask: str, setting: Setting, processes: int
) -> Generator[dict[str, Outcome], None, None]:
    """`evaluate` of every batch, as they are done, in so many processes; a caller that stops early ends them."""
    import multiprocessing

    if processes == 1:
        yield from (evaluate((batch, mask, setting)) for batch in batches)
        return
    # new interpreters: what runs in this one may hold threads and locks
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(evaluate, [(batch, mask, setting) for batch in batches])
