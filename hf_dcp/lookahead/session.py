"""What the plugin, the collator and the callback of one run share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_dcp.config import DcpConfig
from hf_dcp.lookahead.batch_plan import BatchPlan
from hf_dcp.lookahead.depth import Depth
from hf_dcp.lookahead.planning import PlanSettings, PlanSource
from hf_dcp.lookahead.store import StoreAddress
from hf_dcp.lookahead.watch import StoreWatch
from hf_dcp.planning.batch import ModelShape, Topology


@dataclass(frozen=True)
class Group:
    """This process in the DCP group that it belongs to.

    Args:
        rank: inside the DCP group.
        topology: of the group.
        communicator: id of the group's communicator; None for a group of one rank.
        dp_rank, dp_size: which of how many groups with batches of their own this is.
        address: of the plan store.
        timeout: most seconds to wait for a plan of another rank before it is made here.
    """

    rank: int
    topology: Topology
    communicator: int | None
    dp_rank: int
    dp_size: int
    address: StoreAddress
    timeout: float

    @property
    def size(self) -> int:
        return self.topology.world_size

    @property
    def loss_ranks(self) -> int:
        return self.size * self.dp_size


class Session:
    """Filled as a run is set up: the group when the device mesh is built, the shape when the model is known.

    Args:
        plan_store: what the user gave; it may hold a password, and is neither shown nor pickled.
    """

    def __init__(self, config: DcpConfig, plan_store: str = "torch") -> None:
        self.config = config
        self.plan_store = plan_store
        self.group: Group | None = None
        self.shape: ModelShape | None = None
        self.depth: Depth | None = None
        self.loss_scale = 1
        """By what the caller multiplies the losses of evaluation (Trainer: by the number of processes)."""
        self._source: PlanSource | None = None
        self._watch = StoreWatch()

    def require_group(self) -> Group:
        """The group. Raises ValueError if the process groups are not set up."""
        if self.group is None:
            raise ValueError(
                "the DCP group is not set up: pass the DcpParallelismConfig as parallelism_config to TrainingArguments "
                "or Accelerator, or call its setup(), before the first batch"
            )
        return self.group

    def bind(self, shape: ModelShape) -> None:
        """Make the model's attention known; a change makes new plans from here on."""
        if shape != self.shape:
            self.shape, self._source = shape, None

    def run_ahead(self, depth: Depth) -> None:
        """Make known how far plans run ahead, before DataLoader workers are started."""
        if depth != self.depth:
            self.depth, self._source = depth, None

    def see(self, plan: BatchPlan) -> None:
        """A plan is about to be used: warn if it came with trouble."""
        self._watch.see(plan)

    def source(self) -> PlanSource:
        """The plans of this run. Raises ValueError as long as the group or the model is unknown."""
        group = self.require_group()
        if self.shape is None:
            raise ValueError(
                "the model is not known to DCP: add hf_dcp.DcpStatsCallback() to the callbacks of the Trainer, or pass "
                "model=... to collator() or DcpDataLoader"
            )
        if self._source is None:
            self._source = PlanSource(
                PlanSettings(
                    topology=group.topology,
                    shape=self.shape,
                    config=self.config,
                    rank=group.rank,
                    communicator=group.communicator,
                    address=group.address,
                    timeout=group.timeout,
                    **({} if self.depth is None else {"keep": self.depth.keep}),
                )
            )
        return self._source

    def reset(self) -> None:
        """Forget the group: its processes are gone."""
        self.group, self._source = None, None

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__) | {"_source": None, "plan_store": ""}
