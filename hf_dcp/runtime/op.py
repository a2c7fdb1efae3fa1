"""The custom operators: opaque to `torch.compile`, with an explicit backward, and an integer in place of the plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_dcp.runtime.handle import DcpPlan, find_plan
from hf_dcp.runtime.passes import Features, ForwardResult


class _Anchor(np.ndarray):
    """An array that keeps a plan alive for as long as a tensor uses the array's memory."""

    plan: DcpPlan


def _anchor(plan: DcpPlan) -> Tensor:
    """A tensor that keeps ``plan`` alive: backward may come long after the batch is gone."""
    array = np.zeros(1, np.uint8).view(_Anchor)
    array.plan = plan
    return torch.from_numpy(array)


def _features(window: int, scale: float, softcap: float, keep: bool) -> Features:
    """Operators have numbers in place of None: window -1, softcap 0."""
    return Features(window if window >= 0 else None, scale, softcap if softcap > 0 else None, keep)


@torch.library.custom_op(
    "hf_dcp::attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? sinks, SymInt plan, int window, float scale, float softcap, "
    "bool keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    plan: int,
    window: int,
    scale: float,
    softcap: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Forward: (out [1, S, heads, D], lse [S, heads], anchor of the plan, kept Q rows, kept KV rows)."""
    dcp_plan = find_plan(plan)
    result = dcp_plan.executor.forward(q, k, v, sinks, _features(window, scale, softcap, keep))
    return result.out, result.lse, _anchor(dcp_plan), result.kept_q, result.kept_kv


@attention_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    plan: int,
    window: int,
    scale: float,
    softcap: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    kept = q.dtype if q.is_cuda else compute
    _, heads, rows, dim = q.shape
    out, lse = q.new_empty((1, rows, heads, dim)), q.new_empty((rows, heads), dtype=compute)
    anchor = torch.empty(1, dtype=torch.uint8, device="cpu")
    rows_q: Any = 0
    rows_kv: Any = 0
    if keep:
        # How many rows are remote is the plan's affair, and so unknown here.
        context = torch.library.get_ctx()
        rows_q, rows_kv = context.new_dynamic_size(), context.new_dynamic_size()
    return (
        out,
        lse,
        anchor,
        q.new_empty((rows_q, dim), dtype=kept),
        q.new_empty((2, rows_kv, dim), dtype=kept),
    )


@torch.library.custom_op(
    "hf_dcp::attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor out, Tensor lse, Tensor anchor, "
    "Tensor kept_q, Tensor kept_kv, SymInt plan, int window, float scale, float softcap, bool keep)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def attention_backward_op(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    anchor: Tensor,
    kept_q: Tensor,
    kept_kv: Tensor,
    plan: int,
    window: int,
    scale: float,
    softcap: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the sinks (an empty tensor without sinks)."""
    result = ForwardResult(out, lse, kept_q, kept_kv)
    features = _features(window, scale, softcap, keep)
    dq, dk, dv, dsinks = find_plan(plan).executor.backward(grad, q, k, v, sinks, result, features)
    return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks


@attention_backward_op.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # Tokens outside, heads inside, as the executor lays gradients out.
    dq, dk, dv = (x.new_empty((1, x.shape[2], x.shape[1], x.shape[3])).transpose(1, 2) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, sinks, plan, window, scale, softcap, keep = inputs
    out, lse, anchor, kept_q, kept_kv = output
    ctx.save_for_backward(q, k, v, sinks, out, lse, anchor, kept_q, kept_kv)
    ctx.arguments = (plan, window, scale, softcap, keep)
    ctx.mark_non_differentiable(lse, anchor, kept_q, kept_kv)
    ctx.set_materialize_grads(False)
    # The anchor keeps the plan; this also holds where a saved-tensor hook copies tensors away.
    ctx.plan = find_plan(plan) if type(plan) is int else None


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, out, lse, anchor, kept_q, kept_kv = ctx.saved_tensors
    if grad is None:  # other ranks may need this rank's rows all the same
        grad = torch.zeros_like(out)
    dq, dk, dv, dsinks = attention_backward_op(grad, q, k, v, sinks, out, lse, anchor, kept_q, kept_kv, *ctx.arguments)
    return dq, dk, dv, None if sinks is None else dsinks, None, None, None, None, None


attention_op.register_autograd(_backward, setup_context=_setup_context)
