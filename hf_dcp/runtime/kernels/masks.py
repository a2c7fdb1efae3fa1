"""Masks of kernel calls as tensors, built once and shared by heads, groups, layers, and both passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_dcp.runtime.calls import MaskSpec


@dataclass(frozen=True)
class CallMask:
    """An additive mask, and the rows that attend to nothing in this call."""

    additive: Tensor
    """[rows, columns]: 0 where attended to, else -inf."""
    empty: Tensor | None
    """int64 indices of the rows without an attended column, None if there is no such row."""


@dataclass
class MaskCache:
    """Masks by their spec, for one device and dtype."""

    dtype: torch.dtype
    device: torch.device
    _masks: dict[MaskSpec, CallMask] = field(default_factory=dict)

    def get(self, spec: MaskSpec | None) -> CallMask | None:
        """The mask of a call, None for a call without one."""
        if spec is None:
            return None
        if spec not in self._masks:
            self._masks[spec] = self._build(spec)
        return self._masks[spec]

    def _build(self, spec: MaskSpec) -> CallMask:
        allowed = torch.from_numpy(spec.build()).to(self.device)
        additive = torch.zeros(allowed.shape, dtype=self.dtype, device=self.device)
        additive.masked_fill_(~allowed, float("-inf"))
        empty = torch.nonzero(~allowed.any(1)).flatten()
        return CallMask(additive, empty if len(empty) else None)


MaskSource = Callable[[MaskSpec | None], CallMask | None]
