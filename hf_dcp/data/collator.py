"""The collator: a batch of the whole group in, this rank's tokens and plan out. It runs in the DataLoader's workers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hf_dcp.data.rows import IGNORE, GroupBatch, MaskLike, Row, RowReader
from hf_dcp.data.travel import TravellingBatch
from hf_dcp.lookahead.batch_plan import BatchPlan
from hf_dcp.lookahead.payload import PlanningFailed
from hf_dcp.lookahead.report import PlanReport
from hf_dcp.lookahead.session import Session
from hf_dcp.planning.planner import plan_batch


class DcpCollator:
    """Plans the group's batch, or takes its plan from the store, and cuts this rank's tokens.

    Positions and shifted labels are made before the cut. A rank without tokens gets one dummy row with label -100.

    Args:
        session: of the plugin.
        mask: of every row: a text such as ``"causal"``, a mask, ``"shared_question"`` (columns ``question_length`` and
            ``answer_lengths``), ``"documents"`` (column ``document_lengths``), or a function from a row to a mask or
            ranges.
        dummy_token: token id of dummy rows.
        count_items: add ``num_items_in_batch``, the number of labels of the group's batch, for loops without Trainer.
    """

    def __init__(self, session: Session, mask: MaskLike = "causal", dummy_token: int = 0, count_items: bool = False):
        self.session = session
        self.reader = RowReader(mask)
        self.dummy_token = dummy_token
        self.count_items = count_items

    def __call__(self, features: Sequence[Row] | Sequence[list[Row]]) -> dict[str, Any]:
        """Rows, or one list of rows -> ``input_ids``, ``position_ids``, ``labels``, ``shift_labels`` int64[1, S], and
        ``dcp_plan``. ``labels`` equal ``shift_labels``: they tell a model that a loss is wanted.

        Raises:
            ValueError: for rows that make no batch, a batch that can't be planned, or before the group and the model
                are known.
        """
        source = self.session.source()
        batch = self.read(features)
        try:
            plan = source.get(batch.spec)
        except Exception as error:
            raise PlanningFailed(f"{_named(features, batch)} can't be planned: {_text(error)}") from error
        local = self.cut(batch, plan)
        if self.count_items:
            local["num_items_in_batch"] = torch.tensor(batch.num_items)
        return TravellingBatch(local)

    def read(self, features: Sequence[Row] | Sequence[list[Row]]) -> GroupBatch:
        """The batch of the whole group. Raises ValueError for rows that make none."""
        return self.reader.read(rows_of(features))

    def preview(self, dataset: Any) -> PlanReport | None:
        """The report of a plan for the data set's first item, or None if it has no first item.

        The plan is made here. That compiles the planner before worker processes are forked from this one; the first
        process of each machine goes first, and the others find the compiled code. Collective over all processes.
        """
        with local_main_first():
            return self._preview(dataset)

    def _preview(self, dataset: Any) -> PlanReport | None:
        settings = self.session.source().settings
        try:
            first = dataset[0]
        except (TypeError, KeyError, IndexError, NotImplementedError):
            return None
        batch = self.read([first])
        return PlanReport.of(plan_batch(batch.spec, settings.topology, settings.shape, settings.config))

    def cut(self, batch: GroupBatch, plan: BatchPlan) -> dict[str, Any]:
        """The tokens of the plan's rank."""
        tokens = plan.rank_plan.local_tokens()
        shift_labels = _take(batch.shift_labels, tokens, IGNORE)
        return {
            "input_ids": _take(batch.input_ids, tokens, self.dummy_token),
            "position_ids": _take(batch.position_ids, tokens, 0),
            "labels": shift_labels.clone(),
            "shift_labels": shift_labels,
            "dcp_plan": plan,
        }


@contextlib.contextmanager
def local_main_first() -> Iterator[None]:
    """Run the body in the first process of each machine, and then in the others. Collective over all processes."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if several and not first:
        dist.barrier()
    try:
        yield
    finally:
        if several and first:
            dist.barrier()


def rows_of(features: Sequence[Row] | Sequence[list[Row]]) -> list[Row]:
    """The rows of a batch, which come one by one or, from a batched data set, as one list.

    Raises:
        ValueError: for several lists.
    """
    if not any(isinstance(feature, list) for feature in features):
        return list(features)  # type: ignore[arg-type]
    if len(features) != 1:
        raise ValueError(
            f"{len(features)} whole batches came at once: set per_device_train_batch_size and "
            f"per_device_eval_batch_size "
            "to 1, an item of a batched data set is a batch"
        )
    return list(features[0])  # type: ignore[arg-type]


def _named(features: Sequence[Row] | Sequence[list[Row]], batch: GroupBatch) -> str:
    """A batch, so that its user finds it."""
    numbers = getattr(features[0], "numbers", None)
    which = "the batch" if numbers is None else f"the batch of rows {', '.join(map(str, numbers))} of the data set"
    return f"{which} (lengths {', '.join(map(str, batch.spec.lengths))})"


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, PlanningFailed) else f"{type(error).__name__}: {error}"


def _take(values: np.ndarray, tokens: np.ndarray, dummy: int) -> torch.Tensor:
    """[tokens] -> [1, S]; [rows, tokens] -> [rows, 1, S]."""
    local = values[..., tokens] if len(tokens) else np.full((*values.shape[:-1], 1), dummy, np.int64)
    return torch.from_numpy(local).unsqueeze(-2)
