"""A rank's plan as it comes out of a `PlanSource`: with its report, and with how it was come by."""

from __future__ import annotations

from typing import Any, Literal

import torch

from hf_dcp.lookahead.report import PlanReport
from hf_dcp.planning.plan import RankPlan
from hf_dcp.runtime import DcpPlan

Origin = Literal["planned", "fetched", "cached", "replanned"]


class BatchPlan(DcpPlan):
    """A `DcpPlan` that also carries statistics.

    Args:
        report: of the whole group's plan.
        origin: planned here as it was this rank's turn, fetched from the store, found in the cache, or planned here
            since the store didn't have it.
        wait_s: seconds from asking to having it, planning included.
        store_bytes: that went to the plan store for it, or came from there.
        trouble: why the store could not be used, empty if it could.
        lengths: tokens of the sequences of the batch, in their order.
        ready_at: the moment when it was had, on the clock of `time.perf_counter`; 0 if nobody noted it.
    """

    def __init__(
        self,
        rank_plan: RankPlan,
        report: PlanReport,
        origin: Origin,
        wait_s: float,
        communicator: int | None = None,
        backward_kv: Literal["refetch", "keep"] = "refetch",
        device: torch.device | str = "cpu",
        store_bytes: int = 0,
        trouble: str = "",
        kernel: str = "auto",
        lengths: tuple[int, ...] = (),
        ready_at: float = 0.0,
    ) -> None:
        super().__init__(rank_plan, communicator, backward_kv, device, kernel)
        self.report = report
        self.origin: Origin = origin
        self.wait_s = wait_s
        self.store_bytes = store_bytes
        self.trouble = trouble
        self.lengths = lengths
        self.ready_at = ready_at

    def to(
        self, device: torch.device | str | None = None, *args: Any, non_blocking: bool = False, **kw: Any
    ) -> BatchPlan:
        """The same plan for another device; itself if it is there already, or if no device is named."""
        if not isinstance(device, (str, torch.device, int)) or torch.device(device) == self.device:
            return self
        moved = BatchPlan(**(self.__getstate__() | {"device": torch.device(device)}))
        moved.prepare()
        return moved

    def __getstate__(self) -> dict[str, Any]:
        names = ("report", "origin", "wait_s", "store_bytes", "trouble", "lengths", "ready_at")
        own = {name: getattr(self, name) for name in names}
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        BatchPlan.__init__(self, **state)
