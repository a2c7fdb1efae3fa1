"""The dense single-process batches that DCP runs are compared with, against sequences computed one by one."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
from data.dense import DenseCollator, dense_mask

from hf_dcp.masks import parse_mask


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa").double().eval()


def rows_of(lengths: list[int]) -> list[dict[str, list[int]]]:
    rng = np.random.default_rng(0)
    return [{"input_ids": rng.integers(0, 61, n).tolist()} for n in lengths]


def test_loss_of_a_packed_causal_batch_is_that_of_its_sequences() -> None:
    model, rows = small_model(), rows_of([17, 1, 9, 30])
    batch = DenseCollator("causal")([rows])
    loss = model(**batch).loss
    total, count = 0.0, 0
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        if ids.shape[1] < 2:
            continue
        predicted = ids.shape[1] - 1
        total += model(input_ids=ids, labels=ids).loss.item() * predicted
        count += predicted
    assert loss.item() == pytest.approx(total / count, rel=1e-6)  # the loss is made in fp32
    assert int((batch["labels"] != -100).sum()) == count


def test_an_answer_of_a_shared_question_sees_what_it_sees_alone() -> None:
    model, question, answers = small_model(), 6, [5, 1, 8]
    (row,) = rows_of([question + sum(answers)])
    batch = DenseCollator("shared:6,5,1,8")([[row]])
    logits = model(**batch).logits[0]
    start = question
    for answer in answers:
        ids = row["input_ids"][:question] + row["input_ids"][start : start + answer]
        alone = model(input_ids=torch.tensor([ids])).logits[0]
        assert torch.allclose(logits[start : start + answer], alone[question:], rtol=0, atol=1e-12)
        start += answer
    # The last token of an answer doesn't predict the first of the next one.
    assert batch["labels"][0, [0, question + 5, question + 6]].tolist() == [-100] * 3


@pytest.mark.parametrize("mask", ["full", "window:3", "lambda:2,3", "blockwise:4,1,1,1", "documents:5,8"])
def test_dense_mask_is_the_union_of_the_ranges(mask: str) -> None:
    ranges = parse_mask(mask).ranges(13)
    expected = [[any(lo <= j < hi for lo, hi in ranges[i]) for j in range(13)] for i in range(13)]
    assert dense_mask(parse_mask(mask), 13).tolist() == expected


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="lower tokens_per_batch"):
        DenseCollator("causal")([[{"input_ids": [1] * 40000}]])
