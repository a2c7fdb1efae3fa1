"""Execution with FlashAttention where a division's segments are large, and with Triton elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from hf_dcp.runtime.device import DeviceBackward, DeviceForward, TileWork
from hf_dcp.runtime.device_executor import DeviceExecutor
from hf_dcp.runtime.kernels.flash import FlashCall, flash_calls, stand_in, worth
from hf_dcp.runtime.kernels.merge import merge
from hf_dcp.runtime.kernels.segments import build_segments
from hf_dcp.runtime.rows import Index, Rows


@dataclass
class FlashWork(TileWork):
    """The items of one division, for either library."""

    flash: list[FlashCall] = field(default_factory=list)
    """Empty if the rule gives the division to Triton."""

    def __post_init__(self) -> None:
        segments = build_segments(self.plan, self.part, self.order)
        if worth(segments):
            self.flash = flash_calls(self.plan, segments, self.device)


def read(index: Index, rows: Rows) -> Tensor:
    """Rows in the order of an index: [count, heads of a group, ...]."""
    out = rows.remote.new_empty((index.count, *rows.remote.shape[1:]))
    index.read(rows, out)
    return out


class FlashForward(DeviceForward):
    in_place = False

    def attend(self, division: int) -> None:
        calls = self.prepared.calls[division].flash  # type: ignore[attr-defined]
        if not calls:
            super().attend(division)
            return
        q, k, v, out, lse = (self.tensors[name] for name in ("q", "k", "v", "out", "lse"))
        for call in calls:
            part, part_lse = call.forward(
                read(call.q, q), read(call.kv, k), read(call.kv, v), self.features.scale, self.features.softcap
            )
            so_far, so_far_lse = read(call.q, out), read(call.q, lse)
            merge(so_far, so_far_lse, part.to(so_far.dtype), part_lse)
            call.q.write(out, so_far)
            call.q.write(lse, so_far_lse)


class FlashBackward(DeviceBackward):
    in_place = False

    def attend(self, division: int) -> None:
        calls = self.prepared.calls[division].flash  # type: ignore[attr-defined]
        if not calls:
            super().attend(division)
            return
        names = ("q", "k", "v", "grad", "lse", "delta", "dq", "dk", "dv")
        q, k, v, grad, lse, delta, *results = (self.tensors[name] for name in names)
        for call in calls:
            upstream = read(call.q, grad)
            out = stand_in(upstream, read(call.q, delta))
            inputs = read(call.q, q), read(call.kv, k), read(call.kv, v)
            shares = call.backward(
                upstream, *inputs, out, read(call.q, lse), self.features.scale, self.features.softcap
            )
            for index, rows, share in zip((call.q, call.kv, call.kv), results, shares):
                index.add(rows, share)


class FlashExecutor(DeviceExecutor):
    """Executes the plan of one `DcpPlan` by FlashAttention and Triton."""

    forward_pass = FlashForward
    backward_pass = FlashBackward
    work = FlashWork
