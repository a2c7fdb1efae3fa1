"""What stands in for flash-attn's varlen functions in tests: dense attention by the same conventions."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import torch

from hf_dcp.runtime.kernels import flash

CALLS: list[dict] = []
"""Arguments of the calls so far."""


def segments(q_ends, kv_ends, left, right):
    for (q0, q1), (k0, k1) in zip(pairwise(q_ends.tolist()), pairwise(kv_ends.tolist())):
        shift = (k1 - k0) - (q1 - q0)
        row, column = torch.arange(q1 - q0)[:, None], torch.arange(k1 - k0)[None]
        allowed = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
        if left >= 0:
            allowed &= column >= row + shift - left
        if right >= 0:
            allowed &= column <= row + shift + right
        yield slice(q0, q1), slice(k0, k1), allowed


def scores_of(q, k, scale, softcap, allowed):
    raw = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scale
    capped = softcap * torch.tanh(raw / softcap) if softcap else raw
    slope = 1 - torch.tanh(raw / softcap) ** 2 if softcap else torch.ones_like(raw)
    return capped.masked_fill(~allowed, float("-inf")), slope


def forward(q, k, v, cu_q, cu_k, max_q, max_k, *, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
            softcap):  # fmt: skip
    check(q, k, v, cu_q, cu_k, max_q, max_k, causal)
    repeat = q.shape[1] // k.shape[1]
    out, lse = torch.zeros_like(q), torch.empty(q.shape[1], q.shape[0])
    for rows, columns, allowed in segments(cu_q, cu_k, window_size_left, window_size_right):
        keys, values = (x[columns].repeat_interleave(repeat, 1) for x in (k, v))
        scores, _ = scores_of(q[rows], keys, softmax_scale, softcap, allowed)
        weights = torch.softmax(scores, -1).nan_to_num(0.0)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values.double()).to(out.dtype)
        total = scores.logsumexp(-1)
        lse[:, rows] = torch.where(total == float("-inf"), float("inf"), total).float()
    CALLS.append({"pass": "forward", "window": (window_size_left, window_size_right), "segments": len(cu_q) - 1})
    return out, lse, None, None


def backward(dout, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, max_q, max_k, *, dropout_p, softmax_scale, causal,
             window_size_left, window_size_right, softcap, alibi_slopes, deterministic):  # fmt: skip
    check(q, k, v, cu_q, cu_k, max_q, max_k, causal)
    assert deterministic and lse.shape == (q.shape[1], q.shape[0]) and out.dtype == q.dtype
    repeat = q.shape[1] // k.shape[1]
    delta = (dout.double() * out.double()).sum(-1)
    for rows, columns, allowed in segments(cu_q, cu_k, window_size_left, window_size_right):
        keys, values = (x[columns].repeat_interleave(repeat, 1).double() for x in (k, v))
        scores, slope = scores_of(q[rows], keys, softmax_scale, softcap, allowed)
        p = torch.exp(scores - lse[:, rows, None].double())
        dp = torch.einsum("qhd,khd->hqk", dout[rows].double(), values)
        ds = p * (dp - delta[rows].T[..., None]) * slope * softmax_scale
        dq[rows] = torch.einsum("hqk,khd->qhd", ds, keys).to(dq.dtype)
        for result, weights, x in ((dk, ds, q), (dv, p, dout)):
            each = torch.einsum("hqk,qhd->khd", weights, x[rows].double())
            result[columns] = each.unflatten(1, (-1, repeat)).sum(2).to(result.dtype)
    CALLS.append({"pass": "backward", "window": (window_size_left, window_size_right), "segments": len(cu_q) - 1})


def check(q, k, v, cu_q, cu_k, max_q, max_k, causal):
    assert q.dtype in (torch.bfloat16, torch.float16) and k.dtype == v.dtype == q.dtype and not causal
    assert cu_q.dtype == cu_k.dtype == torch.int32 and len(cu_q) == len(cu_k)
    assert max_q == int(cu_q.diff().max()) and max_k == int(cu_k.diff().max())
    assert int(cu_q[-1]) == len(q) and int(cu_k[-1]) == len(k)


def install() -> None:
    """Take the stub for the library in this process."""
    flash.library = lambda: SimpleNamespace(_flash_attn_varlen_forward=forward, _flash_attn_varlen_backward=backward)
