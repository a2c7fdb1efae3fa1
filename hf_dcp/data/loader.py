"""`DcpDataLoader`: batches of this rank for loops without Trainer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Sampler

from hf_dcp.data.batched import BatchedDataset
from hf_dcp.data.collator import DcpCollator
from hf_dcp.data.rows import MaskLike
from hf_dcp.lookahead.statistics import StepStatistics

if TYPE_CHECKING:
    from hf_dcp.integrations.accelerate import DcpParallelismConfig

logger = logging.getLogger("hf_dcp")


class DcpDataLoader:
    """Whole batches, planned in worker processes and cut to this rank's tokens.

    ``model(**batch).loss`` of every rank, averaged over ranks by DDP or FSDP, gives the gradient of the mean over all
    labels
    of the step: ``num_items_in_batch`` is their number over all ranks, divided by the number of ranks. With
    ``accumulation`` a step has several batches; add up their losses without dividing them.

    Args:
        dataset: map-style rows with ``input_ids`` (and perhaps ``labels``), or what ``config.batched(...)`` gives.
        mask: see `hf_dcp.data.collator.DcpCollator`.
        config: the plugin; its group is set up here if no Accelerator did.
        model: makes the model's attention known. Without it, it must be known already (``config.attach(model)``), or be
            that of the only kind of model with ``attn_implementation="dcp"`` in this process.
        tokens_per_batch: most tokens of a group's batch; None: those of the longest row.
        lengths: see `hf_dcp.data.sampler.TokenBatches`, and so for the next three.
        seed: of the order of rows.
        overlong: what becomes of rows that are longer than a batch.
        shuffle: whether rows are in another order in every epoch.
        accumulation: batches per optimiser step.
        lookahead: so many batches ahead are planned while one is trained on; None: that of ``config``. Workers and
            prefetched batches follow from it.
        device: where batches go; None: the CPU, or this process's current GPU if the mesh is one of GPUs.
        options: of `torch.utils.data.DataLoader`, such as ``num_workers``. Without workers nothing is planned ahead.

    Raises:
        ValueError: for what can't be honoured, see the arguments' own descriptions.
    """

    def __init__(
        self,
        dataset: Any,
        mask: MaskLike = "causal",
        config: DcpParallelismConfig | None = None,
        *,
        model: nn.Module | None = None,
        tokens_per_batch: int | None = None,
        lengths: str | Sequence[int] = "length",
        seed: int = 0,
        overlong: str = "error",
        shuffle: bool = True,
        accumulation: int = 1,
        lookahead: int | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        if config is None:
            raise ValueError("config is missing: pass config=hf_dcp.DcpParallelismConfig(dcp_size=...)")
        if accumulation < 1:
            raise ValueError(f"accumulation must be at least 1, not {accumulation}")
        taken = {
            "batch_size",
            "sampler",
            "batch_sampler",
            "shuffle",
            "collate_fn",
            "drop_last",
            "in_order",
        } & options.keys()
        if taken:
            raise ValueError(f"{', '.join(sorted(taken))}: DcpDataLoader chooses batches itself, by tokens_per_batch")
        self.session = config.session
        if self.session.group is None:
            config.setup("cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu")
        self.group = self.session.require_group()
        self._attach(config, model)
        if not isinstance(dataset, BatchedDataset):
            dataset = config.batched(dataset, tokens_per_batch, lengths, seed=seed, overlong=overlong, shuffle=shuffle)
        self.dataset: BatchedDataset = dataset
        if len(dataset) % self.group.dp_size:
            raise ValueError(
                f"{len(dataset)} batches for {self.group.dp_size} data parallel groups: use "
                f"multiple_of={self.group.dp_size}"
            )
        self.accumulation = accumulation
        self.device = device
        self._order = _ShareOfGroup(len(dataset), self.group.dp_rank, self.group.dp_size)
        collator = DcpCollator(self.session, mask, count_items=True)
        self.depth = config.plan_ahead(
            options.pop("num_workers", None), options.pop("prefetch_factor", None), lookahead
        )
        """How far plans run ahead."""
        options |= self.depth.loader_options()
        if self.depth.workers:
            collator.preview(dataset)
        if self.group.rank == self.group.dp_rank == 0:
            logger.log(logging.INFO if self.depth.workers else logging.WARNING, "hf_dcp: %s", self.depth.describe())
        self._loader = DataLoader(dataset, batch_size=1, sampler=self._order, collate_fn=collator, **options)
        self._done = 0
        self.statistics = StepStatistics()
        """Of this rank, since the loader was made; ``over_ranks(device)`` of it is the sum over all."""

    def _attach(self, config: DcpParallelismConfig, model: nn.Module | None) -> None:
        if model is None and self.session.shape is None:
            from hf_dcp.integrations.models import find_models

            found = find_models()
            if len(found) != 1:
                raise ValueError(
                    f'there are {len(found)} models with attn_implementation="dcp": pass model=... to DcpDataLoader'
                )
            model = found[0]
        if model is not None:
            config.attach(model)

    def set_epoch(self, epoch: int) -> None:
        """Make the order of batches that of this epoch, from its beginning."""
        self.dataset.set_epoch(epoch)
        self._done = 0

    def state_dict(self) -> dict[str, int]:
        """Where the loader is: the next batch is that after the last one that was given out."""
        return {"epoch": self.dataset.batches.epoch, "batches": self._done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to where a loader of the same data set, seed and group was."""
        self.dataset.set_epoch(state["epoch"])
        self._done = state["batches"]

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self._order)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The rest of the epoch; the next one begins after it."""
        self._order.skip = self._done
        batches = iter(self._loader)
        while True:
            with self.statistics.waiting():
                step = list(islice(batches, self.accumulation))
            if not step:
                self.statistics.steps.pop()  # the end of the epoch is no step
                break
            items = self._items(step)
            for batch in step:
                self._done += 1
                self.statistics.record(batch["dcp_plan"])
                yield self._on_device({**batch, "num_items_in_batch": items})
        self.set_epoch(self.dataset.batches.epoch + 1)

    def _items(self, step: list[dict[str, Any]]) -> torch.Tensor:
        """Labels of a step over all groups, divided by the number of ranks that share them. Collective."""
        items = torch.stack([batch["num_items_in_batch"] for batch in step]).sum().double()
        if self.group.dp_size > 1:
            # Each rank of a group has counted all of the group.
            on_gpu = dist.get_backend() == "nccl"
            items = items.to("cuda" if on_gpu else "cpu")
            dist.all_reduce(items)
            items = items.cpu() * self.group.dp_size / dist.get_world_size()
        return (items / self.group.loss_ranks).float()

    def _on_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.device is None:
            return batch
        return {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}


class _ShareOfGroup(Sampler[int]):
    """Every dp_size-th item, from ``skip`` on."""

    def __init__(self, items: int, dp_rank: int, dp_size: int) -> None:
        self.numbers = range(dp_rank, items, dp_size)
        self.skip = 0

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers[self.skip :])
