"""Batches from DataLoader workers: the same values, as a plain dictionary, without shared memory."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import DataLoader

from hf_dcp.data.travel import TravellingBatch

VALUES: dict[str, Any] = {
    "input_ids": torch.arange(6).reshape(1, 6),
    "part": torch.arange(10)[::3],
    "scores": torch.tensor([0.5, -1.0]),
    "half": torch.tensor([1.5], dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "none": torch.empty(1, 0, dtype=torch.int64),
    "plan": ("anything", 3),
}


def collate(rows: list[int]) -> TravellingBatch:
    return TravellingBatch(VALUES)


def same(batch: Any) -> bool:
    return list(batch) == list(VALUES) and all(
        torch.equal(batch[name], value) and batch[name].dtype == value.dtype if torch.is_tensor(value)
        else batch[name] == value
        for name, value in VALUES.items()
    )  # fmt: skip


def test_a_worker_hands_over_what_it_made() -> None:
    (batch,) = DataLoader([0], collate_fn=collate, num_workers=1)
    assert type(batch) is dict and same(batch)
    batch["input_ids"] += 1  # it can be written to
    assert not same(batch)


def test_nothing_goes_through_shared_memory_but_what_numpy_lacks() -> None:
    def shared(batch: Any) -> int:
        return bytes(ForkingPickler.dumps(batch)).count(b"rebuild_tensor")

    assert shared(TravellingBatch(VALUES)) == 1  # bfloat16
    without = {name: value for name, value in VALUES.items() if name != "half"}
    assert shared(TravellingBatch(without)) == 0
    assert shared(without) > 0
