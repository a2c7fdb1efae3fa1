"""Ranked answers as pairs and as rows; errors name the row."""

from __future__ import annotations

import re
from typing import Any

import pytest

import hf_dcp
from hf_dcp.data.answers import ranked_pairs, shared_question_row, shared_question_rows
from hf_dcp.data.rows import IGNORE, RowReader


def test_all_pairs_of_a_question_in_order() -> None:
    rows = [{"question": "q", "answers": ["best", "good", "bad"]}]
    got = [(row["prompt"], row["chosen"], row["rejected"]) for row in ranked_pairs(rows)]
    assert got == [("q", "best", "good"), ("q", "best", "bad"), ("q", "good", "bad")]
    scored = [{"question": "q", "answers": ["bad", "best", "also best"], "scores": [0.1, 0.7, 0.7]}]
    got = [(row["chosen"], row["rejected"]) for row in ranked_pairs(scored)]
    assert got == [("best", "bad"), ("also best", "bad")]


def test_a_row_trains_every_answer_behind_the_question() -> None:
    row = shared_question_row([5, 6, 7], [[1, 2], [3]])
    assert row["input_ids"] == [5, 6, 7, 1, 2, 7, 3]
    assert row["labels"] == [IGNORE, IGNORE, IGNORE, 1, 2, IGNORE, 3]
    assert (row["question_length"], row["answer_lengths"], row["length"]) == (2, [3, 2], 7)
    batch = RowReader("shared_question").read([row])
    assert batch.shift_labels.tolist() == [IGNORE, IGNORE, 1, 2, IGNORE, 3, IGNORE]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 2, 3]
    assert batch.spec.masks[0] == hf_dcp.shared_question(2, [3, 2])
    alone = shared_question_row([], [[1, 2], [3]])
    assert alone["labels"] == [1, 2, 3]
    assert RowReader("shared_question").read([alone]).shift_labels.tolist() == [2, IGNORE, IGNORE]


class Letters:
    """A token for each letter."""

    eos_token_id = 0

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


def test_texts_are_cut_at_the_maximum() -> None:
    (row,) = shared_question_rows([{"question": "abc", "answers": ["de", "fghi"]}], Letters(), max_length=6)
    assert row["input_ids"] == [*b"ab", *b"cde", 0, *b"cfgh"]


GOOD: dict[str, Any] = {"question": "abc", "answers": ["d", "e"]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "abc"}, "row 1 has no 'answers': its columns are question"),
        ({"answers": ["a", "b"]}, "row 1 has no 'question'"),
        (GOOD | {"answers": []}, "row 1 has 0 answers: give at least"),
        (GOOD | {"answers": "de"}, "row 1 has answers of type str: give a list"),
        (GOOD | {"answers": ["d", ""]}, "row 1 has an empty answer, number 1"),
    ],
)
def test_bad_rows_are_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ranked_pairs([GOOD, row])
    with pytest.raises(ValueError, match=re.escape(message)):
        list(shared_question_rows([GOOD, row], Letters(), max_length=10))


def test_other_bad_rows_are_named() -> None:
    with pytest.raises(ValueError, match="row 1 has 2 answers but 1 scores"):
        ranked_pairs([GOOD, GOOD | {"scores": [1.0]}])
    with pytest.raises(ValueError, match="row 0 has 1 answers: give at least two"):
        ranked_pairs([GOOD | {"answers": ["d"]}])
    with pytest.raises(ValueError, match="row 0 has a question of 3 tokens, which leaves none of max_length=3"):
        list(shared_question_rows([GOOD], Letters(), max_length=3))
    with pytest.raises(ValueError, match="row 4 has no answers"):
        shared_question_row([1], [], number=4)
    with pytest.raises(ValueError, match="row 4 has no token in answer 1"):
        shared_question_row([1], [[2], []], number=4)
    labels = {"input_ids": [1, 2, 3], "labels": [1, 2]}
    with pytest.raises(ValueError, match="row 0 of the batch has 3 input_ids but 2 labels"):
        RowReader("causal").read([labels])
