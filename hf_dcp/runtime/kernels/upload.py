"""Tables of a plan to a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """int32 arrays as tensors on a device: one asynchronous copy, from pinned memory, for all of them."""
    flat = torch.from_numpy(np.concatenate([*(array.reshape(-1) for array in arrays), np.zeros(1, np.int32)]))
    if device.type == "cuda":
        flat = flat.pin_memory()
    views = flat.to(device, non_blocking=True)[:-1].split([array.size for array in arrays])
    return [view.view(array.shape) for view, array in zip(views, arrays)]
