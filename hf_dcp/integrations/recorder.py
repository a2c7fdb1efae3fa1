"""A stand-in for a plan that notes what attention is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention function.

    Args:
        layer: class name and number of the module that calls.
        heads, kv_heads, head_dim: of query, key and query.
        window: sliding window, None for none.
        causal: whether later tokens are hidden by the module's own word.
    """

    layer: str
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    causal: bool


class Recorder:
    """Pass one as ``dcp_plan``: attention then returns zeros and notes its calls."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.refused = False

    def refuse(self, module: nn.Module, reason: str) -> ValueError:
        """The error for a call that DCP can't run."""
        self.refused = True
        return ValueError(f"{layer_name(module)} {reason}")

    def record(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, window: int | None, causal: bool
    ) -> Tensor:
        """Note a call; its output: zeros [batch, tokens, heads, D]."""
        _, heads, tokens, head_dim = query.shape
        if key.shape[-1] != head_dim or value.shape[-1] != head_dim:
            sizes = f"{head_dim}, {key.shape[-1]} and {value.shape[-1]}"
            raise self.refuse(module, f"has queries, keys and values of {sizes} numbers a head: DCP needs one size")
        if key.shape[2] != tokens or value.shape[2] != tokens:
            raise self.refuse(module, f"attends from {tokens} tokens to {key.shape[2]}: DCP needs self-attention")
        self.calls.append(AttentionCall(layer_name(module), heads, key.shape[1], head_dim, window, causal))
        return query.new_zeros(query.shape[0], tokens, heads, head_dim)


def layer_name(module: nn.Module) -> str:
    """Class and number of an attention layer, for messages."""
    number: Any = getattr(module, "layer_idx", None)
    return type(module).__name__ if number is None else f"{type(module).__name__} of layer {number}"
