"""The two places where Trainer takes the ranks of a DCP group for data parallel ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Trainer, TrainingArguments

from hf_dcp.lookahead.session import Session


def fix_gather(trainer: Trainer, session: Session) -> None:
    """Let evaluation gather one value per sample, not one per sample and rank of its group.

    At the end of an evaluation set Trainer cuts what it has gathered to the number of samples. Ranks of a DCP group
    share their samples, so duplicates go first.
    """
    accelerator = trainer.accelerator

    def gather_for_metrics(value: Any, use_gather_object: bool = False) -> Any:
        if not isinstance(value, Tensor) or value.ndim != 1 or use_gather_object:
            raise ValueError(
                "predictions of DCP batches are the logits of each rank's part, in no order of the data set: use "
                "evaluate() "
                "for the loss, or predict in a Trainer without DCP"
            )
        gathered = without_copies(accelerator.gather(value), len(value), session)
        state = accelerator.gradient_state
        return gathered[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else gathered

    accelerator.gather_for_metrics = gather_for_metrics
    trainer.gather_function = gather_for_metrics


def without_copies(gathered: Tensor, count: int, session: Session) -> Tensor:
    """Of ``count`` values of every rank, in rank order, those of one rank of each group."""
    group = session.require_group()
    copies = gathered.numel() // (count * group.dp_size)
    return gathered.reshape(group.dp_size, copies, count)[:, 0].reshape(-1)


def fix_total_batch_size(trainer: Trainer, session: Session) -> None:
    """Let the logged total batch size count a group once."""
    stock = trainer.get_total_train_batch_size

    def get_total_train_batch_size(args: TrainingArguments) -> int:
        return stock(args) // session.require_group().size

    trainer.get_total_train_batch_size = get_total_train_batch_size
