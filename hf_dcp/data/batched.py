"""`BatchedDataset`: a data set whose items are whole batches, so that a stock Trainer takes them one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from hf_dcp.data.rows import IGNORE, Row
from hf_dcp.data.sampler import TokenBatches


class NumberedRows(list[Row]):
    """Rows that know where in the data set they stand, for errors."""

    def __init__(self, rows: Sequence[Row], numbers: Sequence[int]) -> None:
        super().__init__(rows)
        self.numbers = list(numbers)


class BatchedDataset(Dataset[list[Row]]):
    """A map-style view: item i is the i-th batch of the current epoch, a list of rows.

    For Trainer, use ``per_device_train_batch_size=1`` and ``train_sampling_strategy="sequential"``: the view itself
    orders batches, by seed and epoch. Trainer's "num examples", samples per second and ``per_device_..._batch_size``
    then count batches.

    Args:
        dataset: map-style; rows are dicts with ``input_ids``.
        batches: which rows make which batch.
    """

    def __init__(self, dataset: Any, batches: TokenBatches) -> None:
        if len(dataset) != len(batches.lengths):
            raise ValueError(f"lengths has {len(batches.lengths)} entries for {len(dataset)} rows: give one for each")
        self.dataset = dataset
        self.batches = batches

    @classmethod
    def of(
        cls, dataset: Any, tokens_per_batch: int | None, lengths: str | Sequence[int] = "length", **options: Any
    ) -> BatchedDataset:
        """A view of ``dataset`` with batches of at most so many tokens.

        Args:
            tokens_per_batch: None: as many as the longest row has.
            lengths: a column with the tokens of each row, or the numbers themselves. Without such a column, rows are
                read once, here, to count their tokens.
            options: see `TokenBatches`.
        """
        numbers = read_lengths(dataset, lengths)
        if tokens_per_batch is None:
            tokens_per_batch = max(1, int(np.max(numbers, initial=0)))
        return cls(dataset, TokenBatches(numbers, tokens_per_batch, **options))

    def set_epoch(self, epoch: int) -> None:
        """Trainer and Accelerate call this before each epoch."""
        self.batches.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> list[Row]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        number = int(self.batches.order()[index])
        numbers = self.batches.batches[number].tolist()
        rows = _rows(self.dataset, numbers)
        if number in self.batches.fillers:
            rows = [{**row, "labels": [IGNORE] * len(row["input_ids"])} for row in rows]
        return NumberedRows(rows, numbers)


def read_lengths(dataset: Any, lengths: str | Sequence[int]) -> np.ndarray:
    """Tokens of each row: int64[rows]."""
    if not isinstance(lengths, str):
        return np.asarray(lengths, np.int64)
    if lengths in (getattr(dataset, "column_names", None) or ()):
        return np.asarray(dataset[lengths], np.int64)
    first = dataset[0] if len(dataset) else {}
    if lengths in first:
        return np.array([dataset[i][lengths] for i in range(len(dataset))], np.int64)
    if lengths != "length":
        raise ValueError(f"the data set has no column {lengths!r}: name the column with the tokens of each row")
    return np.array([len(dataset[i]["input_ids"]) for i in range(len(dataset))], np.int64)


def _rows(dataset: Any, numbers: list[int]) -> list[Row]:
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(numbers)
    return [dataset[number] for number in numbers]
