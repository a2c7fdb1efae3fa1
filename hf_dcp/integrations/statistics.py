"""Statistics of training steps, summed over plans and ranks."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

import torch
import torch.distributed as dist

from hf_dcp.lookahead.batch_plan import BatchPlan
from hf_dcp.lookahead.report import PlanReport
from hf_dcp.lookahead.session import Session


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
    fetched: float = 0
    cached: float = 0
    replanned: float = 0
    wait_s: float = 0
    """Seconds that all ranks, or their workers, waited for plans; their own planning included."""

    def record(self, plan: BatchPlan) -> None:
        """Add one forward of this rank."""
        self.plans += 1
        self.wait_s += plan.wait_s
        if plan.origin != "planned":
            setattr(self, plan.origin, getattr(self, plan.origin) + 1)
        if plan.rank_plan.rank != 0:
            return
        report = plan.report
        self.batches += 1
        self.tokens += report.tokens
        for name in ("inter_bytes", "intra_bytes", "ring_bytes", "compute_imbalance", "token_imbalance", "plan_s"):
            setattr(self, name, getattr(self, name) + getattr(report, name))

    def add(self, other: StepStatistics) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def over_ranks(self, device: torch.device) -> StepStatistics:
        """The sum over all processes. Collective."""
        return StepStatistics(*total_over_ranks(torch.tensor(astuple(self), dtype=torch.float64), device).tolist())

    def means(self) -> dict[str, float]:
        """What a log entry shows: sums of tokens and bytes, means of imbalances and seconds."""
        batches, plans = max(self.batches, 1), max(self.plans, 1)
        return {
            "tokens": self.tokens,
            "inter_node_bytes": self.inter_bytes,
            "intra_node_bytes": self.intra_bytes,
            "ratio_to_ring": (self.inter_bytes + self.intra_bytes) / self.ring_bytes if self.ring_bytes else 0.0,
            "compute_imbalance": self.compute_imbalance / batches,
            "token_imbalance": self.token_imbalance / batches,
            "plan_s": self.plan_s / batches,
            "plan_wait_s": self.wait_s / plans,
            "plans_cached": self.cached,
            "plans_replanned": self.replanned,
        }


FIELDS = tuple(StepStatistics().means())
"""Names of the statistics in a log entry, which have ``dcp/`` before them."""


def total_over_ranks(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The sum of fp64 ``values`` over all processes. Collective."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        values = values.to(device)
        dist.all_reduce(values)
    return values.cpu()


def start_line(session: Session, report: PlanReport | None) -> str:
    """One line that says what is on."""
    group = session.require_group()
    nodes = group.topology.num_nodes
    text = f"hf_dcp: {group.dp_size} group(s) of {group.size} rank(s) on {nodes} node(s)"
    if report is None:
        return text
    text += f"; first batch: {report.tokens} tokens, at most {report.max_rank_tokens} per rank"
    if report.ring_bytes:
        sent = report.inter_bytes + report.intra_bytes
        text += f", {sent / 1e6:.4g} MB sent per step, {1 - sent / report.ring_bytes:.0%} less than a dense static ring"
    return text
