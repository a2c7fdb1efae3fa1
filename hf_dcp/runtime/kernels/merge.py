"""Merging partial attention results that were computed over disjoint sets of KV columns."""

from __future__ import annotations

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result into ``out`` and ``lse``, in place.

    Args:
        out: [..., D] normalised output so far, fp32 or fp64.
        lse: [...] natural log of the sum of exponentials so far; -inf where nothing was attended to.
        part, part_lse: the same of further KV columns.
    """
    # The weight of the new part; nan only where both sides are empty, and then nothing changes.
    weight = torch.sigmoid(part_lse - lse).nan_to_num_(0.0)
    out.lerp_(part, weight.unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)
