"""Attention over one rectangle by plain matrix products: for features that the flash kernel lacks (softcap)."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_dcp.runtime.kernels.masks import CallMask
from hf_dcp.runtime.kernels.merge import merge

CHUNK = 512
"""Rows and columns that are computed at a time, so that memory doesn't grow with the rectangle."""


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float, causal: bool, mask: CallMask | None
) -> tuple[Tensor, Tensor]:
    """Like `hf_dcp.runtime.kernels.aten.forward`, with scores capped to ``softcap * tanh(score / softcap)``."""
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:-1], float("-inf"))
    for rows, columns in _chunks(q, k):
        scores = _scores(q, k, rows, columns, scale, softcap)[0]
        _mask(scores, rows, columns, causal, mask)
        part_lse = scores.logsumexp(-1)
        weights = (scores - _finite(part_lse).unsqueeze(-1)).exp_()
        part = _per_kv_head(weights, v) @ v[:, columns].unsqueeze(1)
        merge(out[:, rows], lse[:, rows], part.flatten(0, 1), part_lse)
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    delta: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float,
    causal: bool,
    mask: CallMask | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `hf_dcp.runtime.kernels.aten.backward`, with ``delta`` [heads, rows] itself in place of the output."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, columns in _chunks(q, k):
        scores, tanh = _scores(q, k, rows, columns, scale, softcap)
        _mask(scores, rows, columns, causal, mask)
        weights = (scores - lse[:, rows].unsqueeze(-1)).exp_()
        upstream = _per_kv_head(grad[:, rows], v)
        dv[:, columns] += _fold(weights, v).transpose(1, 2) @ _fold(grad[:, rows], v)
        dp = (upstream @ v[:, columns].unsqueeze(1).transpose(2, 3)).flatten(0, 1)
        ds = weights * (dp - delta[:, rows].unsqueeze(-1)) * (1 - tanh * tanh) * scale
        dq[:, rows] += (_per_kv_head(ds, k) @ k[:, columns].unsqueeze(1)).flatten(0, 1)
        dk[:, columns] += _fold(ds, k).transpose(1, 2) @ _fold(q[:, rows], k)
    return dq, dk, dv


def _chunks(q: Tensor, k: Tensor) -> list[tuple[slice, slice]]:
    return [
        (slice(i, min(i + CHUNK, q.shape[1])), slice(j, min(j + CHUNK, k.shape[1])))
        for i in range(0, q.shape[1], CHUNK)
        for j in range(0, k.shape[1], CHUNK)
    ]


def _scores(q: Tensor, k: Tensor, rows: slice, columns: slice, scale: float, cap: float) -> tuple[Tensor, Tensor]:
    """Capped scores [heads, rows, columns], and the tanh inside."""
    raw = _per_kv_head(q[:, rows], k) @ k[:, columns].unsqueeze(1).transpose(2, 3)
    tanh = (raw.flatten(0, 1) * (scale / cap)).tanh_()
    return tanh * cap, tanh


def _mask(scores: Tensor, rows: slice, columns: slice, causal: bool, mask: CallMask | None) -> None:
    if mask is not None:
        scores += mask.additive[rows, columns]
    elif causal:
        row = torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
        column = torch.arange(columns.start, columns.stop, device=scores.device)[None]
        scores.masked_fill_(column > row, float("-inf"))


def _per_kv_head(x: Tensor, kv: Tensor) -> Tensor:
    """[heads, ...] as [KV heads, heads per KV head, ...]."""
    return x.unflatten(0, (kv.shape[0], -1))


def _fold(x: Tensor, kv: Tensor) -> Tensor:
    """[heads, rows, n] as [KV heads, heads per KV head * rows, n]."""
    return _per_kv_head(x, kv).flatten(1, 2)


def _finite(lse: Tensor) -> Tensor:
    return torch.where(lse == float("-inf"), 0.0, lse)
