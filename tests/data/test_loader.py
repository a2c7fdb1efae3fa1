"""`DcpDataLoader` in one process: order, resume, counts of labels, refusals. On several ranks: tests/integrations."""

from __future__ import annotations

import gc
from itertools import chain
from typing import Any

import pytest
import torch

import hf_dcp
from tests.integrations.small import random_lengths, rows, small_llama

DATA = rows(random_lengths(20))


def loader(**options: Any) -> hf_dcp.DcpDataLoader:
    plugin = hf_dcp.DcpParallelismConfig(dcp=hf_dcp.DcpConfig(block_size=8))
    return hf_dcp.DcpDataLoader(DATA, config=plugin, **({"model": small_llama(), "tokens_per_batch": 100} | options))


def tokens(batches: Any) -> list[list[int]]:
    return [batch["input_ids"][0].tolist() for batch in batches]


def test_an_epoch_has_every_row_once() -> None:
    batches = loader()
    assert len(batches) == len(batches.dataset)
    seen = tokens(batches)
    assert sorted(chain(*seen)) == sorted(chain(*(row["input_ids"] for row in DATA)))
    assert tokens(batches) != seen  # the next epoch: another order of the same batches
    batches.set_epoch(0)
    assert tokens(batches) == seen


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_is_exact(workers: int) -> None:
    straight = loader(num_workers=workers)
    want = tokens(straight) + tokens(straight)
    stopped = loader(num_workers=workers)
    batches = iter(stopped)
    head = tokens([next(batches) for _ in range(3)])
    state = stopped.state_dict()
    assert state == {"epoch": 0, "batches": 3}
    resumed = loader(num_workers=workers)
    resumed.load_state_dict(state)
    assert head + tokens(resumed) + tokens(resumed) == want


def test_labels_are_counted_over_a_step() -> None:
    batches = list(loader(accumulation=2))
    counts = [int((batch["shift_labels"] != -100).sum()) for batch in batches]
    items = [float(batch["num_items_in_batch"]) for batch in batches]
    for i in range(0, len(batches) - 1, 2):
        assert items[i] == items[i + 1] == counts[i] + counts[i + 1]


def test_loss_of_a_step_is_that_of_its_labels() -> None:
    model = small_llama()
    batch = next(iter(loader(model=model)))
    loss = model(**batch, use_cache=False).loss
    logits = model(**{k: v for k, v in batch.items() if "label" not in k}, use_cache=False).logits[0]
    want = torch.nn.functional.cross_entropy(logits, batch["shift_labels"][0])
    assert float(loss.detach()) == pytest.approx(float(want.detach()), abs=1e-6)


def test_the_model_is_found() -> None:
    gc.collect()  # models of other tests may wait in cycles
    model = small_llama()
    assert "dcp_plan" in next(iter(loader(model=None)))
    del model


def test_batches_go_to_the_device() -> None:
    batch = next(iter(loader(device="meta")))
    assert batch["input_ids"].device.type == "meta" and batch["dcp_plan"].device.type == "meta"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"config": None}, "config is missing"),
        ({"accumulation": 0}, "accumulation must be at least 1"),
        ({"batch_size": 4}, "batch_size: DcpDataLoader chooses batches itself"),
        ({"tokens_per_batch": 10}, "rows have more than tokens_per_batch=10"),
        ({"mask": "causla"}, "unknown mask 'causla'"),
    ],
)
def test_bad_arguments(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        if "config" in options:
            hf_dcp.DcpDataLoader(DATA, **options)
        loader(**options)
