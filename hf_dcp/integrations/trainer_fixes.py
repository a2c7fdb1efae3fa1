"""The two places where Trainer takes the ranks of a DCP group for data parallel ones, and a clock for its batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from transformers import Trainer, TrainingArguments

from hf_dcp.lookahead.session import Session
from hf_dcp.lookahead.statistics import StepStatistics


def gather_of_evaluation(trainer: Trainer, session: Session) -> Callable[[Any], Tensor]:
    """A ``trainer.gather_function`` that gathers one value per sample, not one per sample and rank of its group.

    At the end of an evaluation set Trainer cuts what it has gathered to the number of samples. Ranks of a DCP group share
    their samples, so duplicates go first. Accelerator's own function stays as it is: others call it for sums over ranks.
    """

    def gather(value: Any) -> Tensor:
        if not isinstance(value, Tensor) or value.ndim != 1:
            raise ValueError(
                "predictions of DCP batches are the logits of each rank's part, in no order of the data set: use "
                "evaluate() for the loss, or predict in a Trainer without DCP"
            )
        gathered = without_copies(trainer.accelerator.gather(value), len(value), session)
        state = trainer.accelerator.gradient_state
        return gathered[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else gathered

    return gather


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


def time_batches(trainer: Trainer, statistics: Callable[[], StepStatistics]) -> None:
    """Measure how long each step waits for its batches, without the collective call that follows in Trainer."""
    stock = trainer.get_batch_samples

    def get_batch_samples(epoch_iterator: Iterator, num_batches: int, *args: Any, **kwargs: Any) -> Any:
        with statistics().waiting():
            batches = list(itertools.islice(epoch_iterator, num_batches))
        return stock(iter(batches), num_batches, *args, **kwargs)

    trainer.get_batch_samples = get_batch_samples
