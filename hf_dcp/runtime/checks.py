"""Checks of executed plans against dense attention in fp64: the cases of `hf-dcp selftest`, and of the tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hf_dcp.config import DcpConfig
from hf_dcp.masks import (
    Mask,
    causal,
    documents,
    from_ranges,
    intersect_window,
    normalise,
    parse_mask,
    shared_question,
)
from hf_dcp.planning.batch import BatchSpec, ModelShape, RowBytes, Topology
from hf_dcp.planning.plan import PASSES, Message, RankPlan
from hf_dcp.planning.planner import plan_batch
from hf_dcp.runtime.attention import attention
from hf_dcp.runtime.groups import Communicator
from hf_dcp.runtime.handle import DcpPlan
from hf_dcp.runtime.messages import DTYPES

TOLERANCE = {"fp64": 1e-6, "fp32": 1e-5}
"""Allowed errors (statistics travel as fp32, also in fp64); of shorter types: see `_tolerance`."""
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}
RESULTS = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """One batch, model shape and setting to check."""

    mask: str
    lengths: tuple[int, ...]
    block_size: int
    heads: int = 8
    kv_heads: int = 2
    dtype: str = "fp32"
    head_dim: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    reduce_dtype: str | None = None
    backward_kv: Literal["refetch", "keep"] = "refetch"
    head_groups: int | Literal["auto"] = "auto"
    divisions: int = 4
    nodes: tuple[int, ...] | None = None
    """Node of each rank; None: two ranks per node."""
    seed: int = 0

    @property
    def name(self) -> str:
        """The fields that differ from the defaults."""
        plain = asdict(Case("", (), 0))
        return " ".join(f"{name}={value}" for name, value in asdict(self).items() if value != plain[name])

    @property
    def scaling(self) -> float:
        return 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    @property
    def batch(self) -> BatchSpec:
        return BatchSpec(self.lengths, [resolve_mask(self.mask, length) for length in self.lengths])

    def topology(self, world_size: int) -> Topology:
        return Topology(tuple(rank // 2 for rank in range(world_size)) if self.nodes is None else self.nodes)

    def shape(self) -> ModelShape:
        windows: tuple[tuple[int | None, int], ...] = (
            ((None, 1),) if self.window is None else ((None, 1), (self.window, 1))
        )
        return ModelShape(self.heads, self.kv_heads, self.head_dim, self.dtype, windows)

    def config(self) -> DcpConfig:
        return DcpConfig(
            block_size=self.block_size,
            head_groups=self.head_groups,
            divisions=self.divisions,
            reduce_dtype=self.reduce_dtype,
            backward_kv=self.backward_kv,
            seed=self.seed,
        )


def resolve_mask(text: str, length: int) -> Mask:
    """The mask of one sequence: a mask specification, or one of these, which depend on the length.

    - ``documents``: up to three documents; ``shared``: a question and three unequal answers, one of them empty;
    - ``ranges``: explicit ranges at random: overlapping, empty, of both directions.
    """
    if text == "documents":
        return documents([n for n in (length // 2, length // 3, length - length // 2 - length // 3) if n], causal())
    if text == "shared":
        return shared_question(length - length // 3 - length // 4, [length // 3, 0, length // 4])
    if text == "ranges":
        rng = np.random.default_rng(length)
        ranges = np.sort(rng.integers(0, length + 1, (length, 3, 2)), axis=2).astype(np.int32)
        ranges[rng.random((length, 3)) < 0.4] = 0
        return from_ranges(ranges)
    return parse_mask(text)


@dataclass
class Inputs:
    """Inputs of the whole batch, equal on all ranks: q, dout [N, heads, D], k, v [N, KV heads, D], sinks [heads]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sinks: Tensor | None

    @classmethod
    def of(cls, case: Case) -> Inputs:
        generator = torch.Generator().manual_seed(case.seed)
        tokens, dtype = sum(case.lengths), DTYPES[case.dtype]

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        q, k, v, dout = (
            random(tokens, h, case.head_dim) for h in (case.heads, case.kv_heads, case.kv_heads, case.heads)
        )
        return cls(q, k, v, dout, random(case.heads) if case.sinks else None)


def allowed_of(case: Case) -> Iterator[tuple[slice, Tensor]]:
    """Of every sequence: its tokens, and which of them attend to which, bool[length, length]."""
    batch = case.batch
    for i, (mask, length) in enumerate(zip(batch.masks, batch.lengths)):
        ranges = normalise(mask.ranges(length))
        if case.window is not None:
            ranges = intersect_window(ranges, case.window)
        column = np.arange(length)
        allowed = np.zeros((length, length), bool)
        for r in range(ranges.shape[1]):
            allowed |= (column >= ranges[:, r, :1]) & (column < ranges[:, r, 1:])
        start = int(batch.starts[i])
        yield slice(start, start + length), torch.from_numpy(allowed)


def dense(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    """Results of dense attention in fp64, by autograd: out, dq, dk, dv in the layout of the inputs, and dsinks."""
    q, k, v, dout = (x.double() for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    results = dict(zip(RESULTS, (torch.zeros_like(x) for x in (q, q, k, v))))
    if inputs.sinks is not None:
        results["dsinks"] = torch.zeros(case.heads, dtype=torch.float64)
    for tokens, allowed in allowed_of(case):
        for head in range(case.heads):  # one at a time: a sequence squared is large
            kv_head = head // (case.heads // case.kv_heads)
            leaves = [q[tokens, head], k[tokens, kv_head], v[tokens, kv_head]]
            if inputs.sinks is not None:
                leaves.append(inputs.sinks[head].double())
            leaves = [leaf.clone().requires_grad_() for leaf in leaves]
            out = _dense_head(case, allowed, *leaves)
            gradients = torch.autograd.grad(out, leaves, dout[tokens, head])
            results["out"][tokens, head] = out.detach()
            results["dq"][tokens, head] = gradients[0]
            results["dk"][tokens, kv_head] += gradients[1]
            results["dv"][tokens, kv_head] += gradients[2]
            if inputs.sinks is not None:
                results["dsinks"][head] += gradients[3]
    return results


def _dense_head(case: Case, allowed: Tensor, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
    scores = q @ k.T * case.scaling
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(~allowed, float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink.expand(len(q), 1)], 1)
    top = scores.detach().amax(-1, keepdim=True).clamp(min=-1e300)
    weights = torch.exp(scores - top)
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    return weights[:, : len(k)] @ v


def executed(case: Case, inputs: Inputs, plan: DcpPlan, repeat: bool = False) -> dict[str, Tensor]:
    """This rank's results of the operator, put into zeros of the shapes of the whole batch.

    Args:
        repeat: run twice, and require results that are equal to the bit.
    """
    tokens = torch.from_numpy(plan.rank_plan.local_tokens())
    results = _attend(case, inputs, plan, tokens)
    if repeat:
        again = _attend(case, inputs, plan, tokens)
        for name, value in results.items():
            if not torch.equal(value, again[name]):
                raise RuntimeError(f"{case.name}: {name} differs between two equal calls")
    return results


def _attend(case: Case, inputs: Inputs, plan: DcpPlan, tokens: Tensor) -> dict[str, Tensor]:
    leaves = [_local(x, tokens).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    q, k, v = leaves
    sinks = None if inputs.sinks is None else inputs.sinks.clone().requires_grad_()
    out = attention(q, k, v, plan, window=case.window, scale=case.scale, softcap=case.softcap, sinks=sinks)
    out.backward(_local(inputs.dout, tokens).transpose(1, 2))
    results = {}
    for name, value, whole in (
        ("out", out.detach()[0], inputs.q),
        *((f"d{x}", leaf.grad[0].transpose(0, 1), getattr(inputs, x)) for x, leaf in zip("qkv", leaves)),  # type: ignore
    ):
        rows = value[: len(tokens)].double()
        if len(tokens) == 0 and value.abs().max() != 0:
            raise RuntimeError(f"{case.name}: {name} of a dummy row is not 0")
        results[name] = torch.zeros(whole.shape, dtype=torch.float64).index_copy_(0, tokens, rows)
    if sinks is not None:
        assert sinks.grad is not None
        results["dsinks"] = sinks.grad.double()
    return results


def _local(x: Tensor, tokens: Tensor) -> Tensor:
    """[N, heads, D] -> [1, heads, S, D], of tokens outside and heads inside, one dummy row if there is no token."""
    rows = x[tokens] if len(tokens) else torch.ones_like(x[:1])
    return rows.transpose(0, 1)[None].detach()


def planned_bytes(plans: tuple[RankPlan, ...] | list[RankPlan], window: int | None, keep: bool) -> dict[str, int]:
    """Bytes that one forward and one backward send, all ranks together, by "forward inter", "backward intra" ...

    Counted from the rows of the messages and the bytes of a row alone, not from what the executor prepares.
    """
    total: dict[str, int] = {}
    for plan in plans:
        row = RowBytes.of(plan.shape, plan.head_groups, plan.reduce_dtype)
        for name, part in plan.window(window).passes():
            inputs = row.inputs("backward_keep" if keep and name == "backward" else name)
            for m in part.messages[part.messages[:, Message.INCOMING] == 0]:
                each = row.partials(name) if m[Message.PARTIAL] else inputs
                rows = (
                    int(part.q_runs[m[Message.Q_BEGIN] : m[Message.Q_END], 1].sum()),
                    int(part.kv_runs[m[Message.KV_BEGIN] : m[Message.KV_END], 1].sum()),
                )
                inside = plan.node_of_rank[m[Message.PEER]] == plan.node_of_rank[plan.rank]
                key = f"{name} {'intra' if inside else 'inter'}"
                total[key] = total.get(key, 0) + rows[0] * each[0] + rows[1] * each[1]
    return {key: value for key, value in sorted(total.items()) if value}


def sent_bytes(plan: DcpPlan, communicator: Communicator | None) -> dict[str, int]:
    """Bytes that the calls of a plan have sent, all ranks together, by the same names. Collective."""
    keys = [(name, link) for name in PASSES for link in ("inter", "intra")]
    mine = [plan.stats.sent[key] for key in keys]
    rows = [mine] if communicator is None else communicator.gather_numbers(mine)
    return {f"{name} {link}": total for (name, link), total in zip(keys, map(sum, zip(*rows))) if total}


def run_case(
    case: Case,
    communicator: Communicator | None,
    solver: Callable | None = None,
    repeat: bool = False,
) -> dict[str, Any]:
    """Plan, execute and check one case. Collective; the result is the same on all ranks.

    Returns:
        The fields of `hf-dcp selftest`'s cases: errors of out, dq, dk, dv (and dsinks), bytes planned and sent, ok.
    """
    world = 1 if communicator is None else communicator.world_size
    rank = 0 if communicator is None else communicator.rank
    plan = plan_batch(case.batch, case.topology(world), case.shape(), case.config(), solver=solver)
    own = DcpPlan(plan.rank(rank), None if communicator is None else communicator.id, case.backward_kv)
    inputs = Inputs.of(case)
    results = executed(case, inputs, own, repeat)
    sent = sent_bytes(own, communicator)
    calls = own.stats.calls["forward"]
    sent = {key: value // calls for key, value in sent.items()}
    planned = planned_bytes(plan.rank_plans, case.window, case.backward_kv == "keep")
    errors = _errors(case, inputs, _summed(results, communicator), communicator)
    limits = _tolerance(case, inputs) if rank == 0 else {}
    ok = all(errors[name] <= limits[name] for name in errors) if rank == 0 else True
    ok = bool(_from_first(torch.tensor([float(ok)]), communicator)[0]) and sent == planned
    return {
        "name": case.name,
        "mask": case.mask,
        "lengths": list(case.lengths),
        "heads": f"{case.heads}:{case.kv_heads}",
        "block_size": case.block_size,
        "dtype": case.dtype,
        **errors,
        "bytes_planned": sum(planned.values()),
        "bytes_sent": sum(sent.values()),
        "ok": ok,
    }


def _summed(results: dict[str, Tensor], communicator: Communicator | None) -> dict[str, Tensor]:
    if communicator is not None:
        for value in results.values():
            dist.all_reduce(value, group=communicator.forward_group)
    return results


def _from_first(values: Tensor, communicator: Communicator | None) -> Tensor:
    if communicator is not None:
        dist.broadcast(values, communicator.ranks[0], group=communicator.forward_group)
    return values


def _errors(
    case: Case, inputs: Inputs, results: dict[str, Tensor], communicator: Communicator | None
) -> dict[str, float]:
    """Errors by result; the first rank computes the reference for all."""
    names = [*RESULTS, *(["dsinks"] if case.sinks else [])]
    errors = torch.zeros(len(names), dtype=torch.float64)
    if communicator is None or communicator.rank == 0:
        reference = dense(case, inputs)
        errors = torch.tensor([error_of(case, inputs, results[n], reference[n]) for n in names], dtype=torch.float64)
    return dict(zip(names, _from_first(errors, communicator).tolist()))


def error_of(case: Case, inputs: Inputs, value: Tensor, reference: Tensor) -> float:
    """max |value - reference|, over max(max |reference|, max |dout| max |v| scale max(|q|, |k|)); infinite for nan."""
    q, k, v, dout = (float(x.abs().max()) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    size = max(float(reference.abs().max()), dout * v * case.scaling * max(q, k))
    error = float((value - reference).abs().max()) / size
    return error if math.isfinite(error) else math.inf


def _tolerance(case: Case, inputs: Inputs) -> dict[str, float]:
    """Allowed errors. For short types: 2 x (error of torch's kernel in one process + one rounding of each partial)."""
    names = (*RESULTS, "dsinks")
    partial = ROUNDING.get(case.reduce_dtype or case.dtype, 0.0)
    if case.dtype in TOLERANCE:
        return dict.fromkeys(names, TOLERANCE[case.dtype] + 2 * partial)
    leaves = [x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    parts = []
    for tokens, allowed in allowed_of(case):
        q, k, v = (x[tokens].transpose(0, 1)[None] for x in leaves)
        attended = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, scale=case.scaling, enable_gqa=True
        )
        parts.append(attended[0].transpose(0, 1))
    out = torch.cat(parts)
    gradients = torch.autograd.grad(out, leaves, inputs.dout)
    reference = dense(case, inputs)
    single = {
        name: error_of(case, inputs, value.double().nan_to_num(), reference[name])
        for name, value in zip(RESULTS, (out.detach(), *gradients))
    }
    return {name: 2 * (single.get(name, max(single.values())) + partial) for name in names}
