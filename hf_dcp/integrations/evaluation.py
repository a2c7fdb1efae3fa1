"""Evaluation in Trainer: losses, predictions and labels as those of one process, in the order of the data set."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer

from hf_dcp.data.batched import BatchedDataset
from hf_dcp.data.rows import IGNORE
from hf_dcp.integrations.binding import group_mean
from hf_dcp.lookahead.batch_plan import BatchPlan
from hf_dcp.lookahead.session import Session


class Evaluation:
    """A ``trainer.gather_function``: of what the ranks of a group have, one whole for each of their samples.

    Trainer calls it, after each forward, for losses, perhaps for inputs, for predictions and for labels, in this order. Of
    losses it drops those of all but one rank of a group; of the others it puts each rank's tokens where they belong, and
    makes rows of the data set of them, padded with -100. At the end of an evaluation set Trainer wants no more values than
    samples. Accelerator's own function stays as it is: others call it for sums over ranks.
    """

    def __init__(self, trainer: Trainer, session: Session) -> None:
        self.trainer = trainer
        self.session = session
        self.plan: BatchPlan | None = None
        self._later = 0

    def start(self, plan: BatchPlan) -> None:
        """A forward begins."""
        self.plan, self._later = plan, 0
        if not self.trainer.model.training:  # Trainer sets this back after each evaluation
            self.trainer.gather_function = self

    def __call__(self, value: Any) -> Tensor:
        """``value``: [samples] of losses, else [1, S, ...], S the most tokens of any rank.

        Raises:
            ValueError: for predictions that are not one value, or one vector, per token.
        """
        if isinstance(value, Tensor) and value.ndim == 1:
            whole = self._of_one_rank(self._gather(value))
        else:
            self._later += 1
            whole = self._rows(value)
            if self._later == 2 + ("inputs" in self.trainer.args.include_for_metrics):  # labels, which come shifted
                whole = torch.cat([torch.full_like(whole[:, :1], IGNORE), whole[:, :-1]], 1)
        state = self.trainer.accelerator.gradient_state
        return whole[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else whole

    def _gather(self, value: Tensor) -> Tensor:
        """[ranks, ...] of every rank's value. Collective."""
        gathered = self.trainer.accelerator.gather(value[None])
        return gathered.reshape(-1, *value.shape)

    def _of_one_rank(self, gathered: Tensor) -> Tensor:
        """[ranks, n] -> [groups * n]: of each group the first rank's."""
        groups = self.session.require_group().dp_size
        return gathered.reshape(groups, -1, gathered.shape[-1])[:, 0].flatten()

    def _rows(self, value: Any) -> Tensor:
        """Tokens of all ranks as rows of the data set: [samples, longest, ...]."""
        loader = self.trainer.callback_handler.eval_dataloader
        if isinstance(getattr(loader, "dataset", None), BatchedDataset):
            raise ValueError(
                "predictions of whole batches have no order of the data set: give the rows themselves as eval_dataset, not "
                "dcp.batched(...), or use evaluate() for the loss"
            )
        plan = self.plan
        assert plan is not None
        wanted = int(self._gather(torch.tensor([plan.num_rows], device=self.trainer.args.device)).max())
        if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[:2] != (1, wanted):
            raise ValueError(
                "predictions must have one value, or one vector, for each token: let preprocess_logits_for_metrics return "
                "such a tensor (for example logits.argmax(-1)), or name further outputs in ignore_keys"
            )
        tokens = torch.full((wanted,), -1, device=value.device)
        tokens[: plan.rank_plan.num_local] = torch.from_numpy(plan.rank_plan.local_tokens())
        groups = self.session.require_group().dp_size
        places = self._gather(tokens).reshape(groups, -1)
        values = self._gather(value[0]).reshape(groups, places.shape[1], *value.shape[2:])
        lengths = self._gather(torch.tensor(plan.lengths, device=value.device)).reshape(groups, -1, len(plan.lengths))
        rows: list[Tensor] = []
        for place, found, numbers in zip(places, values, lengths[:, 0].tolist()):
            whole = found.new_full((sum(numbers), *found.shape[1:]), IGNORE)
            whole[place[place >= 0]] = found[place >= 0]
            rows += whole.split(numbers)
        return pad_sequence(rows, batch_first=True, padding_value=IGNORE)


class ShiftedLabelSmoother:
    """Trainer's label smoother for labels that are shifted already, and for the group's batch in evaluation.

    Args:
        trainer: whose ``label_smoother`` this replaces.
        evaluation: knows the plan of the forward.
    """

    def __init__(self, trainer: Trainer, evaluation: Evaluation) -> None:
        self.stock = trainer.label_smoother
        self.trainer = trainer
        self.evaluation = evaluation
        if "num_items_in_batch" not in inspect.signature(type(self.stock).__call__).parameters:
            raise ValueError(
                "label_smoothing_factor can't be honoured by DCP with this version of transformers, whose smoothed loss is a "
                "mean over a rank's part: set label_smoothing_factor=0, or install a newer transformers"
            )

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None, **_: Any) -> Tensor:
        """As the stock one: a share of the step's loss in training, the loss of the group's batch in evaluation."""
        if self.trainer.model.training:
            return self.stock(outputs, labels, num_items_in_batch=num_items_in_batch)
        plan = self.evaluation.plan
        assert plan is not None
        total = self.stock(outputs, labels, num_items_in_batch=1)
        scale = self.evaluation.session.loss_scale if num_items_in_batch is not None else 1
        return group_mean(total, (labels != IGNORE).sum(), plan).to(total) / scale
