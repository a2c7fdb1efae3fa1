"""Statistics of training steps, summed over plans and ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import numpy as np
import torch
import torch.distributed as dist

from hf_dcp.lookahead.batch_plan import BatchPlan

MOST_STEPS = 100_000
"""Times of so many steps are kept."""


@dataclass
class StepStatistics:
    """Sums over the batches of some steps; of each batch of a group, its rank 0 adds what concerns the group."""

    batches: float = 0
    tokens: float = 0
    inter_bytes: float = 0
    intra_bytes: float = 0
    ring_bytes: float = 0
    compute_imbalance: float = 0
    token_imbalance: float = 0
    plan_s: float = 0
    plans: float = 0
    """Plans over all ranks; of these:"""
    planned: float = 0
    fetched: float = 0
    cached: float = 0
    replanned: float = 0
    wait_s: float = 0
    """Seconds that all ranks, or their workers, took to get plans; their own planning included."""
    store_bytes: float = 0
    """Bytes that went to the plan store and came from it."""
    exposed_s: float = 0
    """Seconds that steps of all ranks waited for their batches."""
    steps: list[tuple[float, float]] = field(default_factory=list)
    """For each step: seconds that it waited for its batches, and seconds since the last step's wait ended, waiting
    included; over several ranks: of the rank for which it was longest."""
    _last: float | None = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure how long a step waits for its batches."""
        since = time.perf_counter()
        yield
        now = time.perf_counter()
        self.exposed_s += now - since
        self.steps.append((now - since, now - (since if self._last is None else self._last)))
        self._last = now

    def record(self, plan: BatchPlan) -> None:
        """Add one forward of this rank."""
        self.plans += 1
        self.wait_s += plan.wait_s
        self.store_bytes += plan.store_bytes
        setattr(self, plan.origin, getattr(self, plan.origin) + 1)
        if plan.rank_plan.rank != 0:
            return
        report = plan.report
        self.batches += 1
        self.tokens += report.tokens
        for name in ("inter_bytes", "intra_bytes", "ring_bytes", "compute_imbalance", "token_imbalance", "plan_s"):
            setattr(self, name, getattr(self, name) + getattr(report, name))

    def add(self, other: StepStatistics) -> None:
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.steps = (self.steps + other.steps)[-MOST_STEPS:]

    def next(self) -> StepStatistics:
        """Empty statistics of the steps that follow these."""
        return StepStatistics(_last=self._last)

    def over_ranks(self, device: torch.device) -> StepStatistics:
        """The sum over all processes, of each step the longest times. Collective; all must have made as many steps."""
        sums = torch.tensor([getattr(self, name) for name in SUMS], dtype=torch.float64)
        total = StepStatistics(*total_over_ranks(sums, device).tolist())
        steps = torch.tensor(self.steps, dtype=torch.float64).reshape(-1, 2)
        if len(steps):
            steps = total_over_ranks(steps, device, dist.ReduceOp.MAX)
        total.steps = [(wait, period) for wait, period in steps.tolist()]
        return total

    def means(self) -> dict[str, float]:
        """What a log entry shows: sums of tokens, bytes and plans, means of imbalances and seconds."""
        batches, plans = max(self.batches, 1), max(self.plans, 1)
        waits = [wait for wait, _ in self.steps] or [0.0]
        return {
            "tokens": self.tokens,
            "inter_node_bytes": self.inter_bytes,
            "intra_node_bytes": self.intra_bytes,
            "ratio_to_ring": (self.inter_bytes + self.intra_bytes) / self.ring_bytes if self.ring_bytes else 0.0,
            "compute_imbalance": self.compute_imbalance / batches,
            "token_imbalance": self.token_imbalance / batches,
            "plan_s": self.plan_s / batches,
            "plan_wait_s": self.wait_s / plans,
            "step_wait_s_p50": float(np.percentile(waits, 50)),
            "step_wait_s_p99": float(np.percentile(waits, 99)),
            "hidden": 1 - min(self.exposed_s / self.wait_s, 1.0) if self.wait_s else 1.0,
            "plans_made": self.planned,
            "plans_cached": self.cached,
            "plans_replanned": self.replanned,
            "store_bytes": self.store_bytes,
        }


SUMS = tuple(f.name for f in fields(StepStatistics) if f.name not in ("steps", "_last"))
FIELDS = tuple(StepStatistics().means())
"""Names of the statistics in a log entry, which have ``dcp/`` before them."""


def total_over_ranks(
    values: torch.Tensor, device: torch.device, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """The sum (or what else ``operation`` says) of fp64 ``values`` over all processes. Collective."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        values = values.to(device)
        dist.all_reduce(values, operation)
    return values.cpu()
