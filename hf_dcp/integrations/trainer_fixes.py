"""Where Trainer takes the ranks of a DCP group for data parallel ones, and a clock for its batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from transformers import Trainer, TrainingArguments

from hf_dcp.lookahead.session import Session
from hf_dcp.lookahead.statistics import StepStatistics


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
