"""Dense fp64 attention in numpy, forward and backward: what every plan is compared with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Dense:
    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


def dense_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray, mask: np.ndarray) -> Dense:
    """q, dout [tokens, heads, D], k, v [tokens, kv_heads, D], mask bool[tokens, tokens]; gradients by the textbook."""
    share, scale = q.shape[1] // k.shape[1], q.shape[2] ** -0.5
    keys, values = np.repeat(k, share, 1), np.repeat(v, share, 1)
    scores = np.where(mask, np.einsum("qhd,khd->hqk", q, keys) * scale, -np.inf)
    top = np.where(mask.any(1), scores.max(-1), 0.0)[..., None]
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    p = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    out = np.einsum("hqk,khd->qhd", p, values)
    dp = np.einsum("qhd,khd->hqk", dout, values)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
    dk, dv = np.einsum("hqk,qhd->khd", ds, q), np.einsum("hqk,qhd->khd", p, dout)
    heads = (len(k), k.shape[1], share, -1)
    return Dense(out, lse.T, np.einsum("hqk,khd->qhd", ds, keys), dk.reshape(heads).sum(2), dv.reshape(heads).sum(2))
