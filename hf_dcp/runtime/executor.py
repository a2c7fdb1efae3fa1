"""The executor of one plan: checks inputs, agrees with the other ranks, and runs passes.

What layers share (kernel calls, masks, message indices) is prepared once per plan and window.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hf_dcp.planning.plan import Op, WindowPlan
from hf_dcp.runtime.buffers import BufferPool
from hf_dcp.runtime.calls import Call, build_calls
from hf_dcp.runtime.exchange import Exchanges, signed
from hf_dcp.runtime.groups import Communicator, find_communicator
from hf_dcp.runtime.kernels.masks import MaskCache
from hf_dcp.runtime.messages import DTYPES
from hf_dcp.runtime.passes import Backward, Features, Forward, ForwardResult, Prepared

if TYPE_CHECKING:
    from hf_dcp.runtime.handle import DcpPlan


class Executor:
    """Executes the plan of one `DcpPlan`."""

    forward_pass: type[Forward] = Forward
    backward_pass: type[Backward] = Backward

    def __init__(self, dcp_plan: DcpPlan) -> None:
        self.plan = dcp_plan.rank_plan
        self.stats = dcp_plan.stats
        self.device = dcp_plan.device
        self.dtype = DTYPES[self.plan.shape.dtype]
        self.compute_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.masks = MaskCache(self.compute_dtype, self.device)
        self.record: Callable[[str, Op, int, float, float], None] | None = None
        """Called after each instruction with (pass, Op, argument, begin, end) in seconds of `time.perf_counter`."""
        self._agreed = False
        self._communicator_id = dcp_plan.communicator
        self._calls: dict[tuple[int | None, bytes], list[Call]] = {}
        self._prepared: dict[tuple[int | None, str, bool], Prepared] = {}

    @cached_property
    def communicator(self) -> Communicator | None:
        """The plan's communicator; None for a plan for one rank."""
        if self.plan.world_size == 1:
            return None
        found = find_communicator(self._communicator_id, self.plan.world_size)
        if found.rank != self.plan.rank:
            raise RuntimeError(f"the plan is for rank {self.plan.rank}, but this is rank {found.rank} of its group")
        return found

    @cached_property
    def buffers(self) -> BufferPool:
        """Shared by all plans of a communicator."""
        return BufferPool(self.device) if self.communicator is None else self.communicator.buffers(self.device)

    def prepare(self) -> None:
        """Make ahead of the first layer what all layers share; here they make it as they need it."""

    def prepared(self, window: int | None, which: str, keep: bool = False) -> Prepared:
        """What the calls of one window and pass share.

        Args:
            which: "forward" or "backward".
            keep: whether remote inputs of forward are kept for backward.
        """
        key = (window, which, keep and which == "backward")
        if key not in self._prepared:
            self._prepared[key] = Prepared.of(self, self.plan.window(window), which, key[2])
        return self._prepared[key]

    def calls(self, part: WindowPlan, items: np.ndarray) -> list[Call]:
        """Kernel calls for these items (indices, any order) of a window; both passes share those of equal divisions."""
        items = np.sort(items)
        key = (part.window, items.tobytes())
        if key not in self._calls:
            self._calls[key] = build_calls(self.plan, part, items)
        return self._calls[key]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, features: Features) -> ForwardResult:
        """Attention of this rank's rows: q [1, heads, S, D], k and v [1, KV heads, S, D], sinks [heads] or None."""
        self._check_inputs(q, k, v)
        return self.forward_pass(self, features, q, k, v, sinks).execute()

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        result: ForwardResult,
        features: Features,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of q, k, v and the sinks; ``grad`` is that of ``result.out``, [1, S, heads, D]."""
        return self.backward_pass(self, features, grad, q, k, v, sinks, result).execute()

    def exchanges(self, prepared: Prepared, which: str) -> Exchanges:
        """New exchanges for one call; the first call of a plan compares digests first."""
        communicator = self.communicator
        call = 0
        if communicator is not None:
            if not self._agreed:
                self._agree(communicator)
            communicator.sequence += 1
            call = communicator.sequence
        all_stats = (self.stats,) if communicator is None else (self.stats, communicator.stats)
        for stats in all_stats:
            stats.calls[which] += 1
        return Exchanges(
            prepared.messages, communicator, which, self.plan.digest, self.device, all_stats, call, self.buffers
        )

    def _agree(self, communicator: Communicator) -> None:
        digests = [row[0] for row in communicator.gather_numbers([signed(self.plan.digest)])]
        if len(set(digests)) > 1:
            ranks: dict[int, list[int]] = {}
            for rank, digest in enumerate(digests):
                ranks.setdefault(digest, []).append(rank)
            text = ", ".join(f"{digest % 2**64:016x} on ranks {those}" for digest, those in ranks.items())
            raise RuntimeError(f"the ranks of the group have different plans: digest {text}")
        self._agreed = True

    def _check_inputs(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        shape, rows = self.plan.shape, max(self.plan.num_local, 1)
        for name, tensor, heads in (("q", q, shape.heads), ("k", k, shape.kv_heads), ("v", v, shape.kv_heads)):
            want = (1, heads, rows, shape.head_dim)
            if tuple(tensor.shape) != want:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, but the plan is for {list(want)}")
            if tensor.dtype != self.dtype:
                raise ValueError(f"{name} is {tensor.dtype}, but the plan is for {shape.dtype}: plan with that dtype")
            if tensor.device.type != self.device.type:
                raise ValueError(f"{name} is on {tensor.device}, but the plan is on {self.device}: use plan.to(device)")
