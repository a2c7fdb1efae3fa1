"""`attention`: what the attention of a model calls."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_dcp.runtime.handle import DcpPlan, find_plan
from hf_dcp.runtime.op import attention_op


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: DcpPlan | int,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backward_kv: str | None = None,
) -> Tensor:
    """Attention of this rank's rows to all rows of the batch that their masks name, by the plan. Collective.

    Args:
        q: [1, heads, S, D], S the local tokens of the plan, or one dummy row if there are none; any strides.
        k, v: [1, KV heads, S, D].
        plan: the rank's plan, or its handle (inside `torch.compile`, which would compile anew for every plan object).
        window: sliding window of this layer; the plan must have a part for it.
        scale: factor of the scores, default ``1 / sqrt(D)``.
        softcap: caps scores to ``softcap * tanh(score / softcap)``.
        sinks: [heads], a score per head that takes part in the softmax and has no value.
        backward_kv: "refetch" or "keep"; default: what the plan says ("refetch" for a handle inside `torch.compile`).

    Returns:
        [1, S, heads, D] in q's dtype, the layout that Transformers wants. Rows that attend to nothing are 0.

    Raises:
        ValueError: for tensors that the plan is not for, or a window that it has no part for.
        RuntimeError: if ranks have different plans, a peer is gone, or what arrives is not what the plan says.
    """
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be above 0, or None for no cap, not {softcap}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, or None for no window, not {window}")
    handle = plan.handle if isinstance(plan, DcpPlan) else plan
    if backward_kv is None:
        backward_kv = _default_backward_kv(plan)
    if backward_kv not in ("refetch", "keep"):
        raise ValueError(f"backward_kv must be refetch or keep, not {backward_kv!r}")
    out, *_ = attention_op(
        q,
        k,
        v,
        sinks,
        handle,
        -1 if window is None else window,
        1 / math.sqrt(q.shape[-1]) if scale is None else scale,
        0.0 if softcap is None else softcap,
        backward_kv == "keep",
    )
    return out


def _default_backward_kv(plan: DcpPlan | int) -> str:
    if isinstance(plan, DcpPlan):
        return plan.backward_kv
    return "refetch" if torch.compiler.is_compiling() else find_plan(plan).backward_kv
