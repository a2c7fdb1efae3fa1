"""How a batch gets from a DataLoader's worker to the training process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class TravellingBatch(dict[str, Any]):
    """A batch whose tensors travel between processes as bytes; what arrives is a plain dictionary.

    Torch would put each tensor into shared memory and have the worker hand it over when it is asked for, for which the
    worker must leave off planning: the training process would wait for that, once for each tensor.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        tensors = [name for name, value in self.items() if _is_plain(value)]
        return _arrive, ({name: value.numpy() if name in tensors else value for name, value in self.items()}, tensors)


def _arrive(values: dict[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
    return {name: torch.from_numpy(value) if name in tensors else value for name, value in values.items()}


def _is_plain(value: Any) -> bool:
    """Whether numpy knows it: integers, and what else collators make."""
    return type(value) is torch.Tensor and value.device.type == "cpu" and value.dtype in (torch.int64, torch.float32)
