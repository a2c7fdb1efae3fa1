"""Kernel calls by feature: the flash kernel, or plain matrix products where it lacks one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hf_dcp.runtime.calls import Call, Kind
from hf_dcp.runtime.kernels import aten, dense
from hf_dcp.runtime.kernels.masks import MaskCache
from hf_dcp.runtime.messages import PreparedMessage
from hf_dcp.runtime.rows import Rows


@dataclass(frozen=True)
class Kernel:
    """The kernels of one attention call.

    Args:
        scale: factor of the scores.
        softcap: scores become ``softcap * tanh(score / softcap)``; None for no cap.
    """

    scale: float
    softcap: float | None
    masks: MaskCache

    def forward(self, call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Partial (out [n, heads, rows, D], lse [n, heads, rows]) of the call's columns, n equal calls at once."""
        mask, causal = self.masks.get(call.mask), call.kind == Kind.CAUSAL
        if self.softcap is None:
            return aten.forward(q, k, v, scale=self.scale, causal=causal, mask=mask)
        flat = (x.flatten(0, 1) for x in (q, k, v))
        out, lse = dense.forward(*flat, scale=self.scale, softcap=self.softcap, causal=causal, mask=mask)
        return out.view(q.shape), lse.view(q.shape[:-1])

    def receive(self, message: PreparedMessage, tensors: dict[str, Rows]) -> None:
        """Backward inputs have arrived: make what stands in for the output, which doesn't travel."""
        index = next((section.index for section in message.sections if section.name == "grad"), None)
        if self.softcap is not None or index is None:
            return
        grad = tensors["grad"].remote.new_empty((index.count, *tensors["grad"].remote.shape[1:]))
        delta = grad.new_empty(grad.shape[:-1])
        index.read(tensors["grad"], grad)
        index.read(tensors["delta"], delta)
        index.write(tensors["out"], aten.stand_in(grad, delta))

    def backward(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, out: Tensor, delta: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The call's share in the gradients of q, k and v."""
        mask, causal = self.masks.get(call.mask), call.kind == Kind.CAUSAL
        if self.softcap is None:
            return aten.backward(grad, q, k, v, out, lse, scale=self.scale, causal=causal, mask=mask)
        flat = (x.flatten(0, 1) for x in (grad, q, k, v, delta, lse))
        grads = dense.backward(*flat, scale=self.scale, softcap=self.softcap, causal=causal, mask=mask)
        dq, dk, dv = (x.view(like.shape) for x, like in zip(grads, (q, k, v)))
        return dq, dk, dv
