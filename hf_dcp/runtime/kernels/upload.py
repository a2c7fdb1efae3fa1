"""Tables of a plan to a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 4
"""Each array begins at a multiple of so many int32: Triton compiles anew for pointers that are aligned otherwise."""


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """int32 arrays as tensors on a device: one asynchronous copy, from pinned memory, for all of them."""
    padded = [-(-array.size // ALIGNMENT) * ALIGNMENT for array in arrays]
    flat = torch.zeros(sum(padded) + ALIGNMENT, dtype=torch.int32, pin_memory=device.type == "cuda")
    begins = np.cumsum([0, *padded]).tolist()
    for begin, array in zip(begins, arrays):
        flat[begin : begin + array.size] = torch.from_numpy(np.ascontiguousarray(array).reshape(-1))
    there = flat.to(device, non_blocking=True)
    return [there[begin : begin + array.size].view(array.shape) for begin, array in zip(begins, arrays)]
