"""FlashAttention's varlen kernels over segments.

Which library: the package flash-attn (2.7 or newer), or, where that is absent and the package `kernels` is installed, the
same functions from the kernel hub. Facts that shape this file (flash-attn 2.8): out comes in the type of q, lse as
[heads, rows] in fp32; a row without columns has lse +inf, where ours is -inf, and takes +inf in backward, as ours does;
backward takes the out and lse of *all* columns, wants out for the row sums of grad * out alone, and overwrites dq, dk, dv.
A window decides everything: the flag ``causal`` stays False.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_dcp.planning.plan import RankPlan
from hf_dcp.runtime.kernels.segments import Round, Segment, rounds
from hf_dcp.runtime.kernels.upload import upload
from hf_dcp.runtime.rows import Index

WORTH_PAIRS = 512 * 512
"""Mean attended pairs of a segment from which FlashAttention computes a tile list: below, its blocks of 128 rows are mostly
edges, and rows are copied together for little work. Not measured: no GPU was at hand."""
HUB = "kernels-community/flash-attn2"


@cache
def library() -> Any:
    """The module with the varlen functions."""
    if find_spec("flash_attn"):
        return import_module("flash_attn.flash_attn_interface")
    return import_module("kernels").get_kernel(HUB).flash_attn_interface


def worth(segments: list[Segment]) -> bool:
    """The rule by which FlashAttention, not Triton, computes a tile list: its segments are large on average."""
    return bool(segments) and sum(_pairs(s) for s in segments) >= WORTH_PAIRS * len(segments)


def _pairs(s: Segment) -> int:
    """Attended pairs, about: half a triangle is missing for each bound that moves."""
    missing = (s.right == 0) + (s.left >= 0)
    return s.rows * s.columns - missing * s.rows * s.rows // 2


@dataclass(frozen=True)
class FlashCall:
    """One call each way: the segments of a round, with the rows and columns that they read one after the other."""

    window: tuple[int, int]
    q: Index
    kv: Index
    q_ends: Tensor
    """int32[segments + 1]: first row of each segment, and the end."""
    kv_ends: Tensor
    most_rows: int
    most_columns: int

    @classmethod
    def of(cls, plan: RankPlan, one: Round, device: torch.device) -> FlashCall:
        """The call of a round of segments."""
        rows, columns = ([getattr(s, name) for s in one.segments] for name in ("rows", "columns"))
        q = _runs(plan, one.group, [(s.q_begin, s.rows) for s in one.segments])
        kv = _runs(plan, one.group, [(s.kv_begin, s.columns) for s in one.segments])
        ends = upload([np.cumsum([0, *counts]).astype(np.int32) for counts in (rows, columns)], device)
        return cls(
            one.window, Index.of(plan, q, device), Index.of(plan, kv, device), ends[0], ends[1], max(rows), max(columns)
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
        """Attention of rows [rows, heads, D] over k, v [columns, KV heads, D]: out, and lse [rows, heads], -inf if empty."""
        out, lse, *_ = library()._flash_attn_varlen_forward(
            q, k, v, self.q_ends, self.kv_ends, self.most_rows, self.most_columns, dropout_p=0.0, softmax_scale=scale,
            causal=False, window_size_left=self.window[0], window_size_right=self.window[1], softcap=softcap or 0.0,
        )  # fmt: skip
        lse = lse.transpose(0, 1)
        return out, torch.where(lse == float("inf"), float("-inf"), lse)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Share of the segments in dq, dk, dv; ``lse`` [rows, heads] and ``out`` are of all columns."""
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        library()._flash_attn_varlen_backward(
            grad, q, k, v, out, lse.transpose(0, 1).contiguous(), dq, dk, dv, self.q_ends, self.kv_ends, self.most_rows,
            self.most_columns, dropout_p=0.0, softmax_scale=scale, causal=False, window_size_left=self.window[0],
            window_size_right=self.window[1], softcap=softcap or 0.0, alibi_slopes=None, deterministic=True,
        )  # fmt: skip
        return dq, dk, dv


def flash_calls(plan: RankPlan, segments: list[Segment], device: torch.device) -> list[FlashCall]:
    """The calls for segments: no row and no column twice in any of them."""
    return [FlashCall.of(plan, one, device) for one in rounds(segments)]


def _runs(plan: RankPlan, group: int, runs: list[tuple[int, int]]) -> np.ndarray:
    """Runs (place, count) of a head group as runs (slot, count)."""
    base = plan.num_local * plan.head_groups
    return np.array(
        [
            (
                place * plan.head_groups + group if place < plan.num_local else base + place - plan.num_local - 1,
                count,
            )
            for place, count in runs
        ],
        np.int64,
    )


def stand_in(grad: Tensor, delta: Tensor) -> Tensor:
    """A tensor in grad's short type whose row sums with ``grad`` are ``delta``, to about twice that type's precision.

    The two columns where the gradient is largest take it: one most of it, the other what rounding left over.

    Args:
        grad: [..., D], delta: [...], fp32.
    """
    values, columns = grad.float().abs().topk(2, dim=-1)
    signed = grad.float().gather(-1, columns)
    most = torch.where(values[..., 0] > 0, delta / signed[..., 0], 0.0).to(grad.dtype)
    left = delta - most.float() * signed[..., 0]
    rest = torch.where(values[..., 1] > 0, left / signed[..., 1], 0.0).to(grad.dtype)
    return torch.zeros_like(grad).scatter_(-1, columns, torch.stack([most, rest], -1))
