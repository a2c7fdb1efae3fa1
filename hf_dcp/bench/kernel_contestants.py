"""What `hf-dcp bench kernels` compares: this package's kernels, and SDPA, FlexAttention and FlashAttention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hf_dcp.config import DcpConfig
from hf_dcp.masks import parse_mask
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.planner import plan_batch
from hf_dcp.runtime.attention import attention
from hf_dcp.runtime.handle import DcpPlan
from hf_dcp.runtime.kernels.choose import choose_kernel
from hf_dcp.runtime.messages import DTYPES

if TYPE_CHECKING:
    from hf_dcp.bench.kernels import Settings

Passes = tuple[Callable[[], Any], Callable[[], Any]]
MASK_BYTES = 2 * 2**30
"""A dense mask above this is not made."""


class Unsuitable(Exception):
    """Why a contestant can't compute a problem."""


@dataclass
class Problem:
    """Attention over one sequence: q, k, v [1, heads, tokens, D], and the gradient of the output."""

    settings: Settings
    tokens: int
    mask: str
    ranges: np.ndarray
    q: Tensor = field(init=False)
    k: Tensor = field(init=False)
    v: Tensor = field(init=False)
    grad: Tensor = field(init=False)

    def __post_init__(self) -> None:
        s = self.settings
        kind: dict[str, Any] = {"dtype": DTYPES[s.dtype], "device": s.device}
        self.q, self.grad = (torch.randn(1, s.heads, self.tokens, s.head_dim, **kind) for _ in range(2))
        self.k, self.v = (torch.randn(1, s.kv_heads, self.tokens, s.head_dim, **kind) for _ in range(2))
        for x in (self.q, self.k, self.v):
            x.requires_grad_()

    def passes(self, function: Callable[[], Tensor], grad: Tensor) -> Passes:
        """Forward, and backward of one forward that is kept."""
        out = function()
        inputs = [self.q, self.k, self.v]

        def forward() -> None:
            with torch.no_grad():
                function()

        return forward, lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)


def _dcp(kernel: str, problem: Problem) -> Passes:
    s = problem.settings
    if kernel == "aten" and s.device != "cpu":
        raise Unsuitable("for CPUs")
    if kernel != "aten" and s.device != "cuda":
        raise Unsuitable("for CUDA GPUs")
    shape = ModelShape(s.heads, s.kv_heads, s.head_dim, s.dtype, ((None, 1),))
    batch = BatchSpec([problem.tokens], [parse_mask(problem.mask)])
    plan = plan_batch(batch, Topology((0,)), shape, DcpConfig(kernel=kernel)).rank(0)  # type: ignore[arg-type]
    dcp_plan = DcpPlan(plan, device=s.device, kernel=kernel)
    try:
        choose_kernel(kernel, dcp_plan.device, s.dtype, s.head_dim)
    except ValueError as error:
        raise Unsuitable(str(error)) from error
    # The operator keeps the plan while its result lives; between calls this function does.
    return problem.passes(
        lambda: attention(problem.q, problem.k, problem.v, dcp_plan), problem.grad.transpose(1, 2).contiguous()
    )


def _sdpa(problem: Problem) -> Passes:
    mask = None
    if problem.mask != "causal":
        if problem.tokens**2 > MASK_BYTES:
            raise Unsuitable(f"its mask of {problem.tokens:,} x {problem.tokens:,} would be too large")
        mask = torch.from_numpy(dense_mask(problem.ranges)).to(problem.settings.device)
    return problem.passes(
        lambda: torch.nn.functional.scaled_dot_product_attention(
            problem.q, problem.k, problem.v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        ),
        problem.grad,
    )


def _flex(problem: Problem) -> Passes:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if problem.settings.device != "cuda":
        raise Unsuitable("has no backward on CPUs")
    lo, hi = (torch.from_numpy(problem.ranges[..., side].copy()).to(problem.settings.device) for side in range(2))

    def allowed(_b: Tensor, _h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        found = (kv >= lo[q, 0]) & (kv < hi[q, 0])
        for r in range(1, problem.ranges.shape[1]):
            found = found | ((kv >= lo[q, r]) & (kv < hi[q, r]))
        return found

    size = problem.tokens
    blocks = create_block_mask(allowed, None, None, size, size, device=problem.settings.device, _compile=True)
    compiled = torch.compile(flex_attention)
    return problem.passes(
        lambda: compiled(problem.q, problem.k, problem.v, block_mask=blocks, enable_gqa=True), problem.grad
    )


def _flash(problem: Problem) -> Passes:
    if problem.settings.device != "cuda" or not find_spec("flash_attn"):
        raise Unsuitable("flash-attn is not installed, or there is no GPU")
    if problem.mask != "causal":
        raise Unsuitable("has only causal masks and windows")
    from flash_attn import flash_attn_func

    return problem.passes(
        lambda: flash_attn_func(*(x.transpose(1, 2) for x in (problem.q, problem.k, problem.v)), causal=True),
        problem.grad.transpose(1, 2),
    )


def dense_mask(ranges: np.ndarray) -> np.ndarray:
    """bool[tokens, tokens] of disjoint ranges."""
    tokens = len(ranges)
    edge = np.zeros((tokens, tokens + 1), np.int8)
    row = np.arange(tokens)
    for r in range(ranges.shape[1]):
        np.add.at(edge, (row, ranges[:, r, 0]), 1)
        np.add.at(edge, (row, ranges[:, r, 1]), -1)
    return np.cumsum(edge[:, :-1], 1, dtype=np.int8) > 0


CONTESTANTS: dict[str, Callable[[Problem], Passes]] = {
    "aten": partial(_dcp, "aten"),
    "triton": partial(_dcp, "triton"),
    "flash": partial(_dcp, "flash"),
    "SDPA": _sdpa,
    "FlexAttention": _flex,
    "FlashAttention": _flash,
}
