"""Normal form, windows and slices of ranges against the dense mask."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dcp import masks
from hf_dcp.masks import Mask, intersect_window, normalise, parse_mask, to_slices
from hf_dcp.ranges import SHORT
from tests.planning.strategies import any_mask
from tests.test_masks import dense


def dense_of_slices(slices: np.ndarray, length: int) -> np.ndarray:
    """int[length, length]: how often the slices cover each pair."""
    result = np.zeros((length, length), int)
    for first, last, lo, hi, lo_slope, hi_slope in slices.tolist():
        assert first < last and {lo_slope, hi_slope} <= {0, 1}
        for q in range(first, last):
            a, b = lo + (q - first) * lo_slope, hi + (q - first) * hi_slope
            assert 0 <= a < b <= length
            result[q, a:b] += 1
    return result


@st.composite
def wild_ranges(draw: st.DrawFn) -> np.ndarray:
    """Ranges of any number per token: overlapping, touching, repeated, empty anywhere."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    length, width = draw(st.integers(1, 24)), draw(st.sampled_from([0, 1, 2, 3, 5, SHORT + 1, 40]))
    ranges = np.sort(rng.integers(0, length + 1, (length, width, 2)), axis=2)
    if draw(st.booleans()):  # neighbouring rows alike, so that slices are long
        ranges = np.minimum(np.repeat(ranges[:1], length, 0) + np.arange(length)[:, None, None] * [0, 1], length)
    return ranges.astype(np.int32)


@settings(max_examples=200, deadline=None)
@given(wild_ranges())
def test_normal_form(ranges: np.ndarray) -> None:
    length = len(ranges)
    normal = normalise(ranges)
    assert normal.dtype == np.int32 and 1 <= normal.shape[1] <= max(1, ranges.shape[1])
    np.testing.assert_array_equal(dense(normal, length), dense(ranges, length))
    for row in normal.tolist():
        used = [pair for pair in row if pair != [0, 0]]
        assert row[: len(used)] == used, "unused columns come last"
        assert all(lo < hi for lo, hi in used)
        assert all(a[1] < b[0] for a, b in pairwise(used)), "sorted, apart, not touching"


@settings(max_examples=100, deadline=None)
@given(wild_ranges(), st.integers(1, 30))
def test_windows_cut_the_past_only(ranges: np.ndarray, window: int) -> None:
    length = len(ranges)
    i, j = np.arange(length)[:, None], np.arange(length)[None]
    cut = intersect_window(normalise(ranges), window)
    np.testing.assert_array_equal(dense(cut, length), dense(ranges, length) & (j > i - window))
    np.testing.assert_array_equal(normalise(cut), cut)


@settings(max_examples=200, deadline=None)
@given(wild_ranges())
def test_slices_cover_every_pair_once(ranges: np.ndarray) -> None:
    slices = to_slices(normalise(ranges))
    assert slices.dtype == np.int32 and slices.shape[1] == 6
    np.testing.assert_array_equal(dense_of_slices(slices, len(ranges)), dense(ranges, len(ranges)))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), any_mask(n))))
def test_slices_of_masks(case: tuple[int, Mask]) -> None:
    length, mask = case
    ranges = mask.ranges(length)
    np.testing.assert_array_equal(dense_of_slices(to_slices(normalise(ranges)), length), dense(ranges, length))


@pytest.mark.parametrize(
    ("mask", "most"),
    [
        (masks.causal(), 1),
        (masks.full(), 1),
        (masks.sliding_window(50), 2),
        (masks.lambda_mask(7, 50), 5),
        (masks.shared_question(100, [300, 300, 300]), 7),
        (masks.documents([500, 500]), 2),
        (masks.causal_blockwise(100, 2, 1, 1), 22),
    ],
)
def test_usual_masks_have_few_slices(mask: Mask, most: int) -> None:
    assert len(to_slices(normalise(mask.ranges(1000)))) <= most


def test_a_wrong_slice_is_noticed() -> None:
    ranges = masks.lambda_mask(2, 5).ranges(20)
    slices = to_slices(normalise(ranges))
    slices[-1, 2] += 1
    assert (dense_of_slices(slices, 20) != dense(ranges, 20)).any()


LONG = 131072
LONG_MASKS = [
    "causal",
    "full",
    "window:4096",
    "lambda:64,4096",
    "blockwise:256,2,1,1",
    "shared:0.2x4",
    f"documents:{','.join(['512'] * 256)}",
]


@pytest.mark.parametrize("text", LONG_MASKS, ids=lambda text: text[:12])
def test_long_sequences_are_quick(text: str) -> None:
    mask = parse_mask(text)
    times = []
    for _ in range(4):  # the first compiles
        begin = time.process_time()
        to_slices(normalise(mask.ranges(LONG)))
        times.append(time.process_time() - begin)
    assert min(times) < 0.05
