"""Memory that attention calls of all layers and steps share: message buffers, and rows that no result refers to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

SLACK = 3
"""Free memory is given up where all of it is more than so many times what has been in use at once."""


@dataclass
class BufferPool:
    """Buffers of one device, lent until they are given back.

    Whoever doesn't give a buffer back keeps it; the pool makes another. So a call that fails, with messages still under
    way, never has its memory overwritten.
    """

    device: torch.device
    made: int = 0
    """Buffers made so far."""
    in_use: int = 0
    """Bytes that are lent."""
    peak: int = 0
    """The most bytes that were lent at once."""
    _free: dict[int, list[Tensor]] = field(default_factory=dict)
    _free_bytes: int = 0

    def lend(self, size: int) -> Tensor:
        """A buffer uint8 of at least ``size`` bytes, of whatever content."""
        capacity = _rounded(size)
        if self._free.get(capacity):
            buffer = self._free[capacity].pop()
            self._free_bytes -= capacity
        else:
            buffer = torch.empty(capacity, dtype=torch.uint8, device=self.device)
            self.made += 1
        self.in_use += capacity
        self.peak = max(self.peak, self.in_use)
        return buffer

    def take_back(self, buffers: Sequence[Tensor]) -> None:
        """Nothing may use these buffers any more."""
        for buffer in buffers:
            self.in_use -= buffer.numel()
            self._free_bytes += buffer.numel()
            self._free.setdefault(buffer.numel(), []).append(buffer)
        if self.in_use + self._free_bytes > SLACK * self.peak:
            self._free.clear()
            self._free_bytes = 0


def shaped(buffer: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The beginning of a buffer as a tensor of this shape."""
    return buffer[: math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)


def _rounded(size: int) -> int:
    """At most a quarter more, so that messages of about the same size share buffers; 64 bytes at least."""
    step = max(64, 1 << max(size.bit_length() - 3, 0))
    return max(-(-size // step) * step, 64)
