"""Checks of executed plans against dense attention in fp64: the cases of `hf-dcp selftest`, and of the tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hf_dcp.planning.batch import RowBytes
from hf_dcp.planning.plan import PASSES, Message, RankPlan
from hf_dcp.planning.planner import plan_batch
from hf_dcp.planning.reference import execute
from hf_dcp.runtime.attention import attention
from hf_dcp.runtime.cases import RESULTS, Case, Inputs, allowed_of, dense, error_of
from hf_dcp.runtime.groups import Communicator
from hf_dcp.runtime.handle import DcpPlan

TOLERANCE = {"fp64": 1e-6, "fp32": 1e-5}
"""Allowed errors (statistics travel as fp32, also in fp64); of shorter types: see `tolerance_of`."""
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}


def executed(case: Case, inputs: Inputs, plan: DcpPlan, repeat: bool = False) -> dict[str, Tensor]:
    """This rank's results of the operator, put into zeros of the shapes of the whole batch.

    Args:
        repeat: run twice, and require results that are equal to the bit.
    """
    tokens = torch.from_numpy(plan.rank_plan.local_tokens())
    results = _attend(case, inputs, plan, tokens.to(plan.device))
    if repeat:
        again = _attend(case, inputs, plan, tokens.to(plan.device))
        for name, value in results.items():
            if not torch.equal(value, again[name]):
                raise RuntimeError(f"{case.name}: {name} differs between two equal calls")
    return results


def _attend(case: Case, inputs: Inputs, plan: DcpPlan, tokens: Tensor) -> dict[str, Tensor]:
    leaves = [_local(x.to(plan.device), tokens).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    q, k, v = leaves
    sinks = None if inputs.sinks is None else inputs.sinks.clone().to(plan.device).requires_grad_()
    out = attention(q, k, v, plan, window=case.window, scale=case.scale, softcap=case.softcap, sinks=sinks)
    out.backward(_local(inputs.dout.to(plan.device), tokens).transpose(1, 2))
    results = {}
    for name, value, whole in (
        ("out", out.detach()[0], inputs.q),
        *((f"d{x}", leaf.grad[0].transpose(0, 1), getattr(inputs, x)) for x, leaf in zip("qkv", leaves)),  # type: ignore
    ):
        rows = value[: len(tokens)].double().cpu()
        if len(tokens) == 0 and value.abs().max() != 0:
            raise RuntimeError(f"{case.name}: {name} of a dummy row is not 0")
        results[name] = torch.zeros(whole.shape, dtype=torch.float64).index_copy_(0, tokens.cpu(), rows)
    if sinks is not None:
        assert sinks.grad is not None
        results["dsinks"] = sinks.grad.double().cpu()
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


def _sent_by_peer(plan: DcpPlan, communicator: Communicator | None) -> np.ndarray:
    """Bytes sent by the calls of a plan: int64[pass, world, world] by (pass, sender, receiver). Collective."""
    world = plan.rank_plan.world_size
    mine = [plan.stats.sent_to[name, peer] for name in PASSES for peer in range(world)]
    rows = [mine] if communicator is None else communicator.gather_numbers(mine)
    return np.array(rows, np.int64).reshape(world, len(PASSES), world).swapaxes(0, 1)


def _reference_bytes(case: Case, plans: Sequence[RankPlan]) -> np.ndarray:
    """The same as the numpy reference executor counts it; one element per head is enough for that."""
    tokens = sum(case.lengths)
    q, kv = np.zeros((tokens, case.heads, 1)), np.zeros((tokens, case.kv_heads, 1))
    result = execute(plans, q, kv, kv, q, window=case.window, backward_kv=case.backward_kv)
    return np.stack(list(result.sent.values()))


def run_case(
    case: Case,
    communicator: Communicator | None,
    solver: Callable | None = None,
    repeat: bool = False,
    reference: bool = True,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Plan, execute and check one case. Collective; the result is the same on all ranks.

    Args:
        device: where attention runs.
        solver: a placement in place of the search.
        repeat: execute twice, and require results that are equal to the bit.
        reference: also count bytes, rank by rank, with the numpy reference executor, which is slow.

    Returns:
        The fields of `hf-dcp selftest`'s cases: errors of out, dq, dk, dv (and dsinks), bytes planned, sent, and
        counted by the numpy reference, ok.
    """
    world = 1 if communicator is None else communicator.world_size
    rank = 0 if communicator is None else communicator.rank
    plan = plan_batch(case.batch, case.topology(world), case.shape(), case.config(), solver=solver)
    own = DcpPlan(plan.rank(rank), None if communicator is None else communicator.id, case.backward_kv, device)
    inputs = Inputs.of(case)
    results = executed(case, inputs, own, repeat)
    sent = sent_bytes(own, communicator)
    calls = own.stats.calls["forward"]
    sent = {key: value // calls for key, value in sent.items()}
    planned = planned_bytes(plan.rank_plans, case.window, case.backward_kv == "keep")
    errors = _errors(case, inputs, _summed(results, communicator), communicator)
    by_peer = _sent_by_peer(own, communicator)
    ok, counted = True, 0
    if rank == 0:
        limits = tolerance_of(case, inputs)
        ok = all(errors[name] <= limits[name] for name in errors)
        if reference:
            expected = _reference_bytes(case, plan.rank_plans)
            counted = int(expected.sum())
            ok = ok and np.array_equal(by_peer // calls, expected)
    ok, counted = _from_first(torch.tensor([int(ok), counted]), communicator).tolist()
    return {
        **described(case),
        **errors,
        "bytes_planned": sum(planned.values()),
        "bytes_sent": sum(sent.values()),
        "bytes_reference": counted if reference else None,
        "ok": bool(ok) and sent == planned,
    }


def described(case: Case) -> dict[str, Any]:
    """A case in the self-test's report."""
    return {
        "name": case.name,
        "mask": case.mask,
        "lengths": list(case.lengths),
        "heads": f"{case.heads}:{case.kv_heads}",
        "block_size": case.block_size,
        "dtype": case.dtype,
    }


def _summed(results: dict[str, Tensor], communicator: Communicator | None) -> dict[str, Tensor]:
    if communicator is None:
        return results
    summed = {}
    for name, value in results.items():
        there = value.to(communicator.device)
        dist.all_reduce(there, group=communicator.forward_group)
        summed[name] = there.cpu()
    return summed


def _from_first(values: Tensor, communicator: Communicator | None) -> Tensor:
    if communicator is None:
        return values
    there = values.to(communicator.device)
    dist.broadcast(there, communicator.ranks[0], group=communicator.forward_group)
    return there.cpu()


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


def tolerance_of(case: Case, inputs: Inputs) -> dict[str, float]:
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
