"""Batches by token budget: composition, order, splitting, Trainer's view of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, SequentialSampler

from hf_dcp.data.batched import BatchedDataset
from hf_dcp.data.sampler import TokenBatches


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    budget=st.integers(50, 120),
    multiple_of=st.integers(1, 5),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_every_row_is_in_one_batch_within_the_budget(
    lengths: list[int], budget: int, multiple_of: int, seed: int, shuffle: bool
) -> None:
    batches = TokenBatches(lengths, budget, seed, multiple_of, shuffle=shuffle)
    assert len(batches) % multiple_of == 0
    real = batches.batches[: len(batches) - len(batches.fillers)]
    assert sorted(np.concatenate(real).tolist()) == list(range(len(lengths)))
    assert all(0 < batches.tokens(rows) <= budget for rows in batches.batches)
    # Repeats only where no batch could be split.
    assert not batches.fillers or all(len(rows) == 1 for rows in real)
    for epoch in (0, 1, 7):
        batches.set_epoch(epoch)
        assert sorted(batches.order().tolist()) == list(range(len(batches)))
        assert [list(rows) for rows in batches] == [batches.batches[i].tolist() for i in batches.order()]


def test_batches_are_well_filled() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(6, 1.5, 5000).astype(int) + 1, 8192)
    batches = TokenBatches(lengths, 16384)
    assert len(batches) <= 1.03 * lengths.sum() / 16384 + 1


def test_seed_and_epoch() -> None:
    lengths = list(range(1, 40))

    def order(seed: int, epoch: int) -> list[list[int]]:
        batches = TokenBatches(lengths, 60, seed)
        batches.set_epoch(epoch)
        return list(batches)

    assert order(0, 3) == order(0, 3)
    assert order(0, 3) != order(0, 4)
    assert sorted(order(0, 3)) == sorted(order(0, 4))  # composition is the seed's affair alone
    assert sorted(order(0, 0)) != sorted(order(1, 0))
    plain = TokenBatches([10, 20, 30, 40], 50, shuffle=False)
    plain.set_epoch(5)
    assert list(plain) == [[0, 1], [2], [3]]


@pytest.mark.parametrize(
    ("lengths", "options", "text"),
    [
        ([], {}, "the data set has no rows"),
        ([3, 0], {}, "row 1 of the data set has no tokens"),
        ([3, 11, 12], {}, "2 of 3 rows have more than tokens_per_batch=10 tokens, the longest 12"),
        ([3], {"tokens_per_batch": 0}, "tokens_per_batch must be an integer of at least 1, not 0"),
        ([3], {"overlong": "drop"}, "overlong must be 'error' or 'alone'"),
        ([3], {"multiple_of": 0}, "multiple_of must be at least 1"),
        ([3], {"seed": -1}, "seed at least 0"),
    ],
)
def test_bad_arguments(lengths: list[int], options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TokenBatches(lengths, **({"tokens_per_batch": 10} | options))


def test_overlong_rows_alone() -> None:
    batches = TokenBatches([3, 11, 4], 10, overlong="alone")
    assert sorted(map(sorted, batches)) == [[0, 2], [1]]


def _rows(lengths: list[int]) -> list[dict[str, Any]]:
    return [{"input_ids": list(range(n)), "labels": list(range(n)), "length": n} for n in lengths]


def test_items_are_whole_batches() -> None:
    rows = _rows([4, 9, 2, 7, 5])
    for dataset in (rows, Dataset.from_list(rows)):
        view = BatchedDataset.of(dataset, 10)
        items = [view[i] for i in range(len(view))]
        assert sorted(len(row["input_ids"]) for item in items for row in item) == [2, 4, 5, 7, 9]
        assert all(sum(len(row["input_ids"]) for row in item) <= 10 for item in items)
        with pytest.raises(IndexError):
            view[len(view)]
    assert BatchedDataset.of(rows, None).batches.tokens_per_batch == 9


def test_where_lengths_come_from() -> None:
    rows = _rows([4, 9, 2])
    bare = [{"input_ids": row["input_ids"]} for row in rows]
    named = [{"input_ids": row["input_ids"], "n": row["length"]} for row in rows]
    for view in (
        BatchedDataset.of(bare, 10),
        BatchedDataset.of(named, 10, lengths="n"),
        BatchedDataset.of(bare, 10, lengths=[4, 9, 2]),
    ):
        assert view.batches.lengths.tolist() == [4, 9, 2]
    with pytest.raises(ValueError, match="no column 'tokens'"):
        BatchedDataset.of(bare, 10, lengths="tokens")
    with pytest.raises(ValueError, match="lengths has 2 entries for 3 rows"):
        BatchedDataset.of(bare, 10, lengths=[4, 9])


def test_repeated_batches_have_no_labels() -> None:
    """Three rows that fill a batch each, for two groups: the fourth batch is there for the count only."""
    view = BatchedDataset.of(_rows([10, 9, 10]), 10, multiple_of=2)
    labels = [row["labels"] for i in range(len(view)) for row in view[i]]
    assert len(labels) == 4
    assert sum(set(each) == {-100} for each in labels) == 1
    assert sorted(len(each) for each in labels if -100 not in each) == [9, 10, 10]


@pytest.mark.parametrize("context", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_persistent_workers_see_the_epoch(context: str) -> None:
    view = BatchedDataset.of(_rows(list(range(1, 30))), 40)
    options = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": context}
    loader = DataLoader(view, batch_size=1, sampler=SequentialSampler(view), collate_fn=_lengths, **options)
    for epoch in (0, 2):
        view.set_epoch(epoch)
        got = list(loader)
        assert got == [[len(row["input_ids"]) for row in view[i]] for i in range(len(view))]


def _lengths(items: list[list[dict[str, Any]]]) -> list[int]:
    return [len(row["input_ids"]) for row in items[0]]
