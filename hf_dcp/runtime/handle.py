"""A rank plan as a batch carries it through data loaders, `.to(device)` and custom ops."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Any, Literal

import torch

from hf_dcp.planning.plan import RankPlan
from hf_dcp.runtime.groups import Stats

if TYPE_CHECKING:
    from hf_dcp.runtime.executor import Executor


class DcpPlan:
    """One rank's plan for one batch, ready to be executed.

    It pickles (between data loader workers), moves with ``.to(device)`` as the tensors of a batch do, and stands for
    itself in operators as the integer `handle`. Handles are weak: whoever uses one keeps the object.

    Args:
        rank_plan: the plan of this rank.
        communicator: id of the `hf_dcp.runtime.groups.Communicator` of its group; None: the only one of the process.
            Plans for one rank need none.
        backward_kv: "refetch" or "keep": whether backward fetches remote Q, K and V again.
        device: where attention runs.
        kernel: "auto", "aten", "triton" or "flash": which kernels it runs on.
    """

    def __init__(
        self,
        rank_plan: RankPlan,
        communicator: int | None = None,
        backward_kv: Literal["refetch", "keep"] = "refetch",
        device: torch.device | str = "cpu",
        kernel: str = "auto",
    ) -> None:
        if backward_kv not in ("refetch", "keep"):
            raise ValueError(f"backward_kv must be refetch or keep, not {backward_kv!r}")
        self.rank_plan = rank_plan
        self.communicator = communicator
        self.backward_kv = backward_kv
        self.device = torch.device(device)
        self.kernel = kernel
        self.stats = Stats()
        """Calls and bytes of this plan; the communicator adds up those of all its plans."""
        self._handle: int | None = None
        self._executor: Executor | None = None

    @property
    def handle(self) -> int:
        """The number that stands for this object in operators of this process, as long as the object lives."""
        if self._handle is None:
            with _LOCK:
                self._handle = next(_NUMBERS)
                _PLANS[self._handle] = self
        return self._handle

    @property
    def executor(self) -> Executor:
        """What executes the plan; made at first use, with all that is shared by layers."""
        if self._executor is None:
            self._executor = self.executor_class(self)
        return self._executor

    @property
    def executor_class(self) -> type[Executor]:
        """What executes plans on this device and kernel. Raises ValueError if nothing does."""
        from hf_dcp.runtime.kernels.choose import executor_class

        shape = self.rank_plan.shape
        return executor_class(self.kernel, self.device, shape.dtype, shape.head_dim)

    @property
    def num_rows(self) -> int:
        """Rows of this rank's tensors: its tokens, or one dummy row if it has none."""
        return max(self.rank_plan.num_local, 1)

    def to(
        self, device: torch.device | str | None = None, *args: Any, non_blocking: bool = False, **kw: Any
    ) -> DcpPlan:
        """The same plan for another device; itself if it is there already, or if no device is named."""
        if not isinstance(device, (str, torch.device, int)) or torch.device(device) == self.device:
            return self
        moved = DcpPlan(self.rank_plan, self.communicator, self.backward_kv, torch.device(device), self.kernel)
        moved.prepare()
        return moved

    def prepare(self) -> None:
        """Bring to a GPU, without waiting, the tables that all layers read; on a CPU layers make what they need."""
        if self.device.type == "cuda":
            self.executor.prepare()

    def pin_memory(self) -> DcpPlan:
        """Itself: nothing in it is copied to devices in bulk."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {
            "rank_plan": self.rank_plan,
            "communicator": self.communicator,
            "backward_kv": self.backward_kv,
            "device": self.device,
            "kernel": self.kernel,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        DcpPlan.__init__(self, **state)

    def __repr__(self) -> str:
        plan = self.rank_plan
        return f"DcpPlan(rank {plan.rank} of {plan.world_size}, {plan.num_local} of {plan.num_tokens} tokens)"


_PLANS: weakref.WeakValueDictionary[int, DcpPlan] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count(1000)
"""Handles; far from 0 and 1, which compilers treat as constants."""
_LOCK = threading.Lock()


def find_plan(handle: int) -> DcpPlan:
    """The plan with this handle. Raises RuntimeError if it is gone."""
    plan = _PLANS.get(handle)
    if plan is None:
        raise RuntimeError(f"there is no plan with handle {handle} in this process: keep the DcpPlan until backward")
    return plan
