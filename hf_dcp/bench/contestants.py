"""What is compared: plans of the same batch by different names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from hf_dcp.bench.group import Group
from hf_dcp.config import PLACEMENTS, DcpConfig
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.plan import Message, Op, PassPlan, RankPlan
from hf_dcp.planning.planner import plan_batch
from hf_dcp.planning.static import SCHEMES, plan_static
from hf_dcp.runtime.attention import attention
from hf_dcp.runtime.handle import DcpPlan
from hf_dcp.runtime.messages import DTYPES

DENSE = tuple(f"{name}-dense" for name in SCHEMES)
ROW_EXACT = tuple(name for name in SCHEMES if name in PLACEMENTS)
NAMES = ("dcp", *DENSE, *ROW_EXACT, *(name for name in PLACEMENTS if name not in (*ROW_EXACT, "auto")), "sdpa")
"""``dcp``, the published static schemes, their placements under our rules, single solvers, torch's own attention."""


def check_names(names: Sequence[str], world_size: int) -> None:
    """Raises ValueError for a name that can't be compared."""
    for name in names:
        if name not in NAMES:
            raise ValueError(f"--placements must name some of {', '.join(NAMES)}, not {name!r}")
    if len(set(names)) != len(names):
        raise ValueError(f"--placements must name each once, not {','.join(names)}")
    if "sdpa" in names and world_size > 1:
        raise ValueError("--placements sdpa is torch's attention in one process: start only one, or leave it out")


def make_rank_plans(
    name: str, batch: BatchSpec, topology: Topology, shape: ModelShape, config: DcpConfig
) -> Sequence[RankPlan]:
    """The plans of all ranks for one of the names but sdpa."""
    if name in DENSE:
        return plan_static(name.removesuffix("-dense"), batch, topology, shape, config).rank_plans
    placement = "auto" if name == "dcp" else name
    return plan_batch(batch, topology, shape, config.with_changes(placement=placement)).rank_plans


@dataclass
class Contestant:
    """One name with its plan, as this rank executes it; ``q``, ``k``, ``v`` and ``grad`` are random."""

    name: str
    rank_plan: RankPlan
    plan: DcpPlan
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    alone: dict[str, DcpPlan] = field(default_factory=dict)
    """"compute" and "exchange": the same plan without the other."""

    @classmethod
    def of(cls, name: str, rank_plan: RankPlan, group: Group, backward_kv: str, alone: bool) -> Contestant:
        def handle(plan: RankPlan) -> DcpPlan:
            number = None if group.communicator is None else group.communicator.id
            return DcpPlan(plan, number, backward_kv, group.device)  # type: ignore[arg-type]

        shape, rows = rank_plan.shape, max(rank_plan.num_local, 1)
        generator = torch.Generator().manual_seed(rank_plan.rank)

        def rows_of(heads: int) -> Tensor:
            values = torch.randn(1, rows, heads, shape.head_dim, generator=generator)
            return values.to(group.device, DTYPES[shape.dtype])

        q, k, v = (rows_of(h).transpose(1, 2).requires_grad_() for h in (shape.heads, shape.kv_heads, shape.kv_heads))
        parts = {"compute": compute_only(rank_plan), "exchange": exchange_only(rank_plan)} if alone else {}
        handles = {part: handle(plan) for part, plan in parts.items()}
        return cls(name, rank_plan, handle(rank_plan), q, k, v, rows_of(shape.heads), handles)

    @property
    def window(self) -> int | None:
        return self.rank_plan.windows[0].window

    def forward(self, plan: DcpPlan) -> Tensor:
        return attention(self.q, self.k, self.v, plan, window=self.window)

    def backward(self, out: Tensor) -> None:
        torch.autograd.grad(out, (self.q, self.k, self.v), self.grad)


class Sdpa(Contestant):
    """torch's causal attention of every sequence, one by one, in place of a plan."""

    lengths: Sequence[int]

    @classmethod
    def like(cls, other: Contestant, batch: BatchSpec) -> Sdpa:
        """With the tensors of ``other``, padding left out."""
        tokens = batch.num_tokens
        q, k, v = (x.detach()[:, :, :tokens].requires_grad_() for x in (other.q, other.k, other.v))
        made = cls("sdpa", other.rank_plan, other.plan, q, k, v, other.grad[:, :tokens])
        made.lengths = batch.lengths
        return made

    def forward(self, plan: DcpPlan) -> Tensor:
        parts = zip(*(x.split(list(self.lengths), 2) for x in (self.q, self.k, self.v)))
        outs = [
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            for q, k, v in parts
        ]
        return torch.cat([out.transpose(1, 2) for out in outs], 1)


def compute_only(plan: RankPlan) -> RankPlan:
    """The plan without exchanges; remote rows have whatever values there are in memory."""
    return _only(plan, (Op.ATTEND, Op.FINISH), messages=False)


def exchange_only(plan: RankPlan, exchanges: dict[str, list[int]] | None = None) -> RankPlan:
    """The plan without compute, merging, and adding.

    Args:
        exchanges: only these exchanges of each pass.
    """
    return _only(plan, (Op.START, Op.WAIT, Op.FINISH), messages=True, exchanges=exchanges)


def uncovered(plan: RankPlan) -> dict[str, list[int]]:
    """Exchanges of each pass with no compute between their start and their end: the first fetch, the last return."""
    found: dict[str, list[int]] = {}
    for which, part in plan.windows[0].passes():
        covered: dict[int, bool] = {}
        for op, argument in part.program.tolist():
            if op == Op.START:
                covered[argument] = False
            elif op == Op.ATTEND:
                covered = dict.fromkeys(covered, True)
            elif op == Op.WAIT and not covered.pop(argument):
                found.setdefault(which, []).append(argument)
    return found


def _only(
    plan: RankPlan, kept: Sequence[Op], messages: bool, exchanges: dict[str, list[int]] | None = None
) -> RankPlan:
    def changed(part: PassPlan, which: str) -> PassPlan:
        program = part.program[[op in kept for op in part.program[:, 0]]]
        table = part.messages if messages else part.messages[:0]
        if exchanges is not None:
            wanted = exchanges.get(which, [])
            program = program[(program[:, 0] == Op.FINISH) | np.isin(program[:, 1], wanted)]
            table = table[np.isin(table[:, Message.EXCHANGE], wanted)]
        return replace(part, program=program, messages=table)

    windows = tuple(
        replace(w, forward=changed(w.forward, "forward"), backward=changed(w.backward, "backward"))
        for w in plan.windows
    )
    return replace(plan, windows=windows, digest=plan.digest ^ (2 if not messages else 1 if exchanges is None else 3))


def make_contestants(
    names: Sequence[str], batch: BatchSpec, group: Group, shape: ModelShape, config: DcpConfig, alone: bool
) -> list[Contestant]:
    """All contestants of one batch; each is planned by one rank, which hands out the rank plans. Collective."""
    planned = [name for name in names if name != "sdpa"] or ["dcp"]
    made: dict[str, Sequence[RankPlan]] = {}
    failure = None
    for i, name in enumerate(planned):
        if i % group.world_size == group.rank and failure is None:
            try:
                made[name] = make_rank_plans(name, batch, group.topology, shape, config)
            except ValueError as error:
                failure = f"{name}: {error}"
    failures = [text for text in group.gather(failure) if text]
    if failures:
        raise ValueError(failures[0])
    contestants = []
    for i, name in enumerate(planned):
        parts = [plan.to_bytes() for plan in made[name]] if name in made else None
        own = RankPlan.from_bytes(group.scatter(i % group.world_size, parts))
        contestants.append(Contestant.of(name, own, group, config.backward_kv, alone))
    if "sdpa" in names:
        contestants.append(Sdpa.like(contestants[0], batch))
    return [c for c in contestants if c.name in names]
