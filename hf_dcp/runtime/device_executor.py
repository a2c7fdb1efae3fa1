"""The executor of one plan on a GPU: `hf_dcp.runtime.executor` with the device's passes, tables and exchanges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hf_dcp.planning.plan import WindowPlan
from hf_dcp.runtime.device import DeviceBackward, DeviceForward, TileWork
from hf_dcp.runtime.exchange import Exchanges
from hf_dcp.runtime.executor import Executor
from hf_dcp.runtime.kernels import tuning
from hf_dcp.runtime.kernels.tables import BlockTables
from hf_dcp.runtime.passes import Prepared
from hf_dcp.runtime.streams import DeviceExchanges, HeaderWatch, side_stream

if TYPE_CHECKING:
    from hf_dcp.runtime.handle import DcpPlan

MOST_ELEMENTS = 2**31
"""Kernels have 32-bit offsets."""
_WATCHES: dict[torch.device, HeaderWatch] = {}


class DeviceExecutor(Executor):
    """Executes the plan of one `DcpPlan` by GPU kernels."""

    forward_pass = DeviceForward
    backward_pass = DeviceBackward
    work = TileWork

    def __init__(self, dcp_plan: DcpPlan) -> None:
        super().__init__(dcp_plan)
        shape = self.plan.shape
        per_kv_head = shape.heads // shape.kv_heads
        self.configs = {name: tuning.config(name, shape.head_dim, per_kv_head) for name in tuning.SHAPES}
        self._tables: dict[tuple[int | None, str, bool], BlockTables] = {}
        self._headers: dict[tuple[int | None, str, bool], dict] = {}

    def prepare(self) -> None:
        """Build and upload, ahead of the first layer, what its passes need."""
        for part in self.plan.windows:
            for which, kernels in (("forward", ("forward",)), ("backward", ("dq", "dkv"))):
                prepared = self.prepared(part.window, which)
                self.tables(part.window, which, False)
                for work in prepared.calls:
                    for name in kernels:
                        work.tiles(self.configs[name])  # type: ignore[attr-defined]

    def calls(self, part: WindowPlan, items: np.ndarray) -> list:
        items = np.sort(items)
        key = (part.window, items.tobytes())
        if key not in self._calls:
            self._calls[key] = self.work(self.plan, part, items, self.device)  # type: ignore[assignment]
        return self._calls[key]

    def tables(self, window: int | None, which: str, keep: bool) -> BlockTables:
        """The block tables of a pass."""
        key = (window, which, keep and which == "backward")
        if key not in self._tables:
            part = self.plan.window(window)
            one = part.forward if which == "forward" else part.backward
            messages = self.prepared(window, which, keep).messages
            self._tables[key] = BlockTables.of(self.plan, part, one, messages, self.device)
        return self._tables[key]

    def _check_inputs(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        super()._check_inputs(q, k, v)
        if q.numel() >= MOST_ELEMENTS:
            raise ValueError(
                f"q has {q.numel():,} elements, and kernels count to {MOST_ELEMENTS:,}: use more ranks, or fewer tokens"
            )

    def kept(self, rows: Tensor) -> Tensor:
        """Kept rows in the type that the operator promises: on a CPU (interpreted kernels) that of computation."""
        return rows.clone() if self.device.type == "cuda" else rows.to(self.compute_dtype, copy=True)

    def exchanges(self, prepared: Prepared, which: str) -> Exchanges:
        plain = super().exchanges(prepared, which)
        watch = self._watch()
        if watch is not None:
            watch.verify()
        headers = self._headers.setdefault((prepared.part.window, which, False), {})
        return DeviceExchanges(
            plain.table, plain.communicator, plain.which, plain.digest, plain.device, plain.stats, plain.call,
            plain.buffers, side=side_stream(self.device), watch=watch, headers=headers,
        )  # fmt: skip

    def _watch(self) -> HeaderWatch | None:
        if self.device.type != "cuda":
            return None
        if self.device not in _WATCHES:
            _WATCHES[self.device] = HeaderWatch(self.device)
        return _WATCHES[self.device]
