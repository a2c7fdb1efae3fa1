"""The flash kernel of torch for CPUs over rectangles of rows and columns, one or several of the same size.

Facts that shape this file (torch 2.13): the kernel takes strided views and fewer KV than query heads, in both
directions; it dies of a division by zero on empty inputs; a row without any attended column gets lse 0 instead of -inf;
its backward takes the lse and the output of *all* columns, and then gives these columns' share in the gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_dcp.runtime.kernels.masks import CallMask

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, mask: CallMask | None
) -> tuple[Tensor, Tensor]:
    """Attention of the rows over these columns alone.

    Args:
        q: [n, heads, rows, D], k, v: [n, KV heads, columns, D]; rows and columns at least 1; fp32 or fp64.
        causal: rows and columns are as many, and row i attends to columns 0 ... i.

    Returns:
        out [n, heads, rows, D], normalised over these columns, and lse [n, heads, rows], -inf where a row attends to nothing.
    """
    additive = None if mask is None else mask.additive
    out, lse = _forward(q, k, v, 0.0, causal, attn_mask=additive, scale=scale)
    if mask is not None and mask.empty is not None:
        lse[..., mask.empty] = float("-inf")
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    causal: bool,
    mask: CallMask | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Share of these columns in the gradients.

    Args:
        grad: gradient of the output [n, heads, rows, D].
        out: the final output, or any tensor with the same row sums of ``grad * out`` (see `stand_in`).
        lse: the final lse; +inf for rows that attend to nothing at all.

    Returns:
        Gradients of q, k, v in their shapes.
    """
    additive = None if mask is None else mask.additive
    return _backward(grad, q, k, v, out, lse, 0.0, causal, attn_mask=additive, scale=scale)


def stand_in(grad: Tensor, delta: Tensor) -> Tensor:
    """A tensor that can take the place of the output in `backward`: the row sums of ``grad * result`` are ``delta``.

    The kernel wants the output only for those row sums. Rows that were received come with their delta and without their
    output. All of it goes to the column where the gradient is largest, so that one rounding is all that happens.

    Args:
        grad: [..., D], delta: [...].
    """
    largest = grad.abs().argmax(-1, keepdim=True)
    at_largest = grad.gather(-1, largest)
    value = torch.where(at_largest == 0, 0.0, delta.unsqueeze(-1) / at_largest)
    return torch.zeros_like(grad).scatter_(-1, largest, value)
