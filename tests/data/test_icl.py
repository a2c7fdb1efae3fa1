"""Many-shot rows, and their blockwise masks against a definition by sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dcp.data.icl import blocks_of_examples, blocks_of_tokens, icl_row
from hf_dcp.data.rows import IGNORE, Row

SHOTS = [([1, 2], [3]), ([4], [5, 6]), ([7, 8], [9])]


def row_of(lengths: list[int]) -> Row:
    return {"input_ids": [0] * sum(lengths), "example_lengths": lengths}


def seen(ranges: np.ndarray) -> list[set[int]]:
    return [{j for lo, hi in row for j in range(lo, hi)} for row in ranges.tolist()]


def expected(block: list[int], tests: set[int], window: int, sinks: int) -> list[set[int]]:
    """What each token sees: block numbers of all tokens, those of the test, and the window and sinks in blocks."""
    result = []
    for i, b in enumerate(block):
        allowed = [j for j in range(i + 1) if b in tests or b - window < block[j] or block[j] < sinks]
        result.append(set(allowed))
    return result


def test_rows_train_answers() -> None:
    row = icl_row(SHOTS[:2], SHOTS[2])
    assert row["input_ids"] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert row["labels"] == [IGNORE, IGNORE, 3, IGNORE, 5, 6, IGNORE, IGNORE, 9]
    assert row["example_lengths"] == [3, 3, 3]
    assert icl_row(SHOTS[:2], SHOTS[2], labels="test")["labels"] == [IGNORE] * 8 + [9]
    assert icl_row(SHOTS[:2], SHOTS[2], max_length=8)["input_ids"] == [4, 5, 6, 7, 8, 9]
    assert icl_row([], SHOTS[2])["example_lengths"] == [3]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=7),
    st.integers(1, 3),
    st.integers(0, 9),
    st.integers(1, 3),
    st.integers(1, 6),
)
def test_masks_are_what_they_say(lengths: list[int], window: int, sinks: int, per_block: int, block: int) -> None:
    row = row_of(lengths)
    test = len(lengths) - 1
    number = [(k // per_block if k < test else -(-test // per_block)) for k, n in enumerate(lengths) for _ in range(n)]
    got = blocks_of_examples(row, window, sinks, per_block).ranges(sum(lengths))
    assert seen(got) == expected(number, {max(number)}, window, sinks)
    by_tokens = [i // block for i in range(sum(lengths))]
    tests = set(by_tokens[sum(lengths) - lengths[-1] :])
    got = blocks_of_tokens(row, block, window, sinks).ranges(sum(lengths))
    assert seen(got) == expected(by_tokens, tests, window, sinks)


def test_bad_rows_and_blocks_are_named() -> None:
    with pytest.raises(ValueError, match="row 3 has a test example without an answer"):
        icl_row(SHOTS, ([1], []), number=3)
    with pytest.raises(ValueError, match="row 3 has no token in example 0"):
        icl_row([([], [])], SHOTS[0], number=3)
    with pytest.raises(ValueError, match="row 3 has a test example of 3 tokens, more than max_length=2"):
        icl_row(SHOTS, SHOTS[0], max_length=2, number=3)
    with pytest.raises(ValueError, match="examples_per_block must be an integer of at least 1, not 0"):
        blocks_of_examples(row_of([2, 2]), 1, 0, 0)
    with pytest.raises(ValueError, match="window_blocks"):
        blocks_of_tokens(row_of([2, 2]), 2, 0, 0)
