"""Masks against their definitions, token by token; wrong masks and texts."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_dcp import masks
from hf_dcp.masks import Mask, parse_mask


def dense(ranges: np.ndarray, length: int) -> np.ndarray:
    """bool[rows, length]: the union of every row's ranges."""
    result = np.zeros((len(ranges), length), bool)
    for i, row in enumerate(ranges):
        for lo, hi in row:
            result[i, lo:hi] = True
    return result


def by_definition(mask: Mask, length: int, rule) -> bool:
    ranges = mask.ranges(length)
    assert ranges.dtype == np.int32 and ranges.shape[0] == length and ranges.shape[2] == 2
    assert (ranges >= 0).all() and (ranges <= length).all()
    expected = [[bool(rule(i, j)) for j in range(length)] for i in range(length)]
    return dense(ranges, length).tolist() == expected


sizes = st.integers(1, 30)
few = st.integers(0, 6)


@given(sizes)
def test_causal_and_full(length: int) -> None:
    assert by_definition(masks.causal(), length, lambda i, j: j <= i)
    assert by_definition(masks.full(), length, lambda i, j: True)
    assert length == 1 or not by_definition(masks.causal(), length, lambda i, j: j < i)


@given(sizes, sizes, few)
def test_windows(length: int, window: int, sink: int) -> None:
    assert by_definition(masks.sliding_window(window), length, lambda i, j: i - window < j <= i)
    assert by_definition(masks.lambda_mask(sink, window), length, lambda i, j: j <= i and (j < sink or i - window < j))


@given(sizes, st.integers(1, 8), st.integers(1, 3), few, few)
def test_causal_blockwise(length: int, block: int, window: int, sink: int, test: int) -> None:
    last_block = (length - 1) // block

    def rule(i: int, j: int) -> bool:
        b, c = i // block, j // block
        return j <= i and (c < sink or b - window < c or b > last_block - test)

    assert by_definition(masks.causal_blockwise(block, window, sink, test), length, rule)


@given(few, st.lists(few, min_size=1, max_size=5))
def test_shared_question(question: int, answers: list[int]) -> None:
    length = question + sum(answers)
    part = np.repeat(np.arange(len(answers) + 1), [question, *answers])
    mask = masks.shared_question(question, answers)
    assert by_definition(mask, length, lambda i, j: j <= i and part[j] in (0, part[i]))
    alone = [np.arange(question), *(question + np.arange(n) for n in answers)]
    assert mask.positions(length).tolist() == np.concatenate(alone).tolist()
    first = [i for i in range(1, length) if part[i] != part[i - 1]]
    if question:  # its last token predicts the first token of the first answer that has one
        first = first[1:]
    assert mask.segment_starts(length).tolist() == first


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from([masks.causal(), masks.full()]))
def test_documents(lengths: list[int], inner: Mask) -> None:
    length = sum(lengths)
    part = np.repeat(np.arange(len(lengths)), lengths)
    mask = masks.documents(lengths, inner)
    assert by_definition(mask, length, lambda i, j: part[i] == part[j] and (j <= i or inner == masks.full()))
    assert mask.positions(length).tolist() == np.concatenate([np.arange(n) for n in lengths]).tolist()
    assert mask.segment_starts(length).tolist() == np.cumsum(lengths)[:-1].tolist()


def test_documents_may_hold_other_masks() -> None:
    mask = masks.documents([6, 6], masks.shared_question(2, [3, 1]))
    inner = masks.shared_question(2, [3, 1])
    block = dense(inner.ranges(6), 6)
    nothing = np.zeros((6, 6), bool)
    assert dense(mask.ranges(12), 12).tolist() == np.block([[block, nothing], [nothing, block]]).tolist()
    assert mask.positions(12).tolist() == [0, 1, 2, 3, 4, 2] * 2
    assert mask.segment_starts(12).tolist() == [5, 6, 11]


def test_other_masks_have_plain_positions_and_no_segments() -> None:
    for mask in (masks.causal(), masks.full(), masks.lambda_mask(1, 2), masks.from_ranges(np.zeros((5, 0, 2), int))):
        assert mask.positions(5).tolist() == [0, 1, 2, 3, 4] and mask.positions(5).dtype == np.int64
        assert mask.segment_starts(5).tolist() == [] and mask.segment_starts(5).dtype == np.int64


def test_fractions_are_exact() -> None:
    for length in (1, 7, 100, 131072):
        answer = 29 * length // 100
        explicit = masks.shared_question(length - 3 * answer, [answer] * 3)
        mask = parse_mask("shared:0.29x3")
        np.testing.assert_array_equal(mask.ranges(length), explicit.ranges(length))
        np.testing.assert_array_equal(mask.positions(length), explicit.positions(length))
        np.testing.assert_array_equal(mask.segment_starts(length), explicit.segment_starts(length))
    assert parse_mask("shared:0.2x5").positions(10).tolist() == [0, 1] * 5


def test_texts() -> None:
    expected = {
        "causal": masks.causal(),
        "full": masks.full(),
        "window:4096": masks.sliding_window(4096),
        "lambda:64,4096": masks.lambda_mask(64, 4096),
        "lambda:0,1": masks.lambda_mask(0, 1),
        "blockwise:256,2,1,1": masks.causal_blockwise(256, 2, 1, 1),
        "blockwise:256,2,0,0": masks.causal_blockwise(256, 2, 0, 0),
        "shared:10,5,0,7": masks.shared_question(10, [5, 0, 7]),
        "shared:0,5": masks.shared_question(0, [5]),
        "documents:3,4": masks.documents([3, 4]),
        "documents:3,4/full": masks.documents([3, 4], masks.full()),
        "documents:3,4/window:2": masks.documents([3, 4], masks.sliding_window(2)),
    }
    for text, mask in expected.items():
        assert parse_mask(text) == mask
    assert parse_mask("window:4096") != parse_mask("window:4095")


BAD_TEXTS = {
    "": "unknown mask ''",
    "casual": "unknown mask 'casual': write one of causal, full",
    "causal:1": "takes 0 parameters",
    "window": "takes 1 parameters, not 0",
    "window:0": "window must be an integer of at least 1",
    "window:-5": "window must be an integer of at least 1",
    "window:1.5": "parameters must be integers",
    "window:99999999999": "below 2",
    "lambda:64": "takes 2 parameters, not 1",
    "lambda:-1,5": "sink must be",
    "lambda:1,0": "window must be",
    "blockwise:0,1,1,1": "block must be",
    "blockwise:1,0,1,1": "window_blocks must be",
    "blockwise:1,1,-1,1": "sink_blocks must be",
    "blockwise:1,1,1,-1": "test_blocks must be",
    "blockwise:256,2": "takes 4 parameters, not 2",
    "shared:5": "at least 2 parameters",
    "shared:-1,3": "question must be",
    "shared:3,-1": "answers must be",
    "shared:0.3x4": "4 answers of 0.3 of the sequence don't fit",
    "shared:0x4": "don't fit",
    "shared:0.2x0": "0 answers",
    "shared:0.2x-1": "-1 answers",
    "shared:ax2": "the share must be a number",
    "shared:1/0x2": "the share must be a number",
    "documents:": "at least 1 parameters",
    "documents:3,0": "lengths must be",
    "documents:3/foo": "unknown mask 'foo'",
    "documents:3/window:0": "window must be",
}


@pytest.mark.parametrize("text", BAD_TEXTS)
def test_bad_texts(text: str) -> None:
    with pytest.raises(ValueError, match="(?s).*") as error:
        parse_mask(text)
    assert BAD_TEXTS[text] in str(error.value) and "write" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: masks.sliding_window(True), "window must be an integer"),
        (lambda: masks.sliding_window(2.0), "window must be an integer"),
        (lambda: masks.shared_question(4, []), "answers is empty"),
        (lambda: masks.documents([]), "lengths is empty"),
        (
            lambda: masks.shared_question(4, [3, 3]).ranges(11),
            "10 tokens (question 4 + answers [3, 3]), but the sequence",
        ),
        (lambda: masks.shared_question(4, [3, 3]).positions(9), "make the lengths add up"),
        (lambda: masks.shared_question(4, [3, 3]).segment_starts(9), "make the lengths add up"),
        (lambda: masks.documents([4, 3]).ranges(8), "7 tokens (lengths [4, 3]), but the sequence has 8"),
        (lambda: masks.documents([4, 3]).positions(8), "make the lengths add up"),
        (lambda: masks.documents([4, 3]).segment_starts(8), "make the lengths add up"),
        (lambda: masks.from_ranges(np.zeros((4, 1, 2), int)).ranges(5), "4 tokens, but the sequence has 5"),
        (lambda: masks.from_ranges(np.zeros((4, 2), int)), "int64[4, 2]"),
        (lambda: masks.from_ranges(np.zeros((4, 1, 3), int)), "shape"),
        (lambda: masks.from_ranges(np.zeros((4, 1, 2))), "float64"),
        (lambda: masks.from_ranges(np.zeros((4, 1, 2), bool)), "bool"),
        (lambda: masks.from_ranges([[[0, 1]], [[0, 1], [1, 2]]]), "pad tokens"),
        (lambda: masks.from_ranges(np.array([[[0, 1]], [[1, 0]]])), "ranges[1, 0] is (1, 0)"),
        (lambda: masks.from_ranges(np.array([[[0, 1]], [[0, 3]]])), "lo <= hi <= 2"),
        (lambda: masks.from_ranges(np.array([[[-1, 1]], [[0, 1]]])), "ranges[0, 0] is (-1, 1)"),
        (lambda: masks.from_ranges(np.array([[[0, 2**40]]])), "lo <= hi <= 1"),
    ],
)
def test_bad_masks(make, words: str) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert words in str(error.value)


def some_masks(length: int) -> list[Mask]:
    rest = length - 5
    array = np.zeros((length, 1, 2), np.int64)
    array[:, :, 1] = 1
    other = array.copy()
    other[-1] = 0
    return [
        masks.causal(),
        masks.full(),
        masks.sliding_window(3),
        masks.lambda_mask(1, 3),
        masks.causal_blockwise(2, 1, 1, 1),
        masks.shared_question(5, [rest]),
        masks.shared_question(5, [rest - 1, 1]),
        parse_mask("shared:0.2x2"),
        masks.documents([5, rest]),
        masks.documents([5, rest], masks.full()),
        masks.from_ranges(array),
        masks.from_ranges(other),
    ]


def test_masks_are_values() -> None:
    """Equal masks are equal, with equal keys and hashes, also after a journey to another process; others are not."""
    first, second = some_masks(20), [pickle.loads(pickle.dumps(mask)) for mask in some_masks(20)]  # noqa: TID251
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            assert (a == b) == (i == j) and (a.key(20) == b.key(20)) == (i == j)
        assert hash(a) == hash(second[i]) and " at 0x" not in a.key(20)


def test_explicit_ranges_dont_change_with_the_argument() -> None:
    array = np.array([[[0, 1]], [[0, 2]]], np.int32)
    mask = masks.from_ranges(array)
    array[1, 0, 1] = 0
    assert mask.ranges(2).tolist() == [[[0, 1]], [[0, 2]]]
    with pytest.raises(ValueError):
        mask.ranges(2)[0] = 0
