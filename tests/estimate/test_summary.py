"""Sums over batches, and the sentence that follows from them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from hf_dcp.estimate.schemes import DCP, Outcome
from hf_dcp.estimate.summary import best_static, histogram, notes, summarise, verdict

BASE = Outcome(1.0, 0.2, 1.0, 100, 50, 30, 1.05, 7)
UNEQUAL, EQUAL = np.array([100, 200, 4000, 30_000]), np.array([1000, 1010, 1040])


def outcomes(zigzag: Outcome, ring: Outcome | None = None, dcp: Outcome = BASE) -> list[dict[str, Outcome]]:
    return [{DCP: dcp, "ring": ring or replace(zigzag, attention_s=9.0), "zigzag": zigzag}]


def test_speedups_of_the_sum_and_of_batches() -> None:
    rng = np.random.default_rng(0)
    times = rng.uniform(1, 4, (40, 2))
    batches = [
        {DCP: replace(BASE, attention_s=a), "zigzag": replace(BASE, attention_s=b, memory=i)}
        for i, (a, b) in enumerate(times)
    ]
    found = summarise(batches)["zigzag"]
    steps = times + 1.0
    assert found.speedup == pytest.approx(steps[:, 1].sum() / steps[:, 0].sum())
    assert found.attention_speedup == pytest.approx(times[:, 1].sum() / times[:, 0].sum())
    assert found.spread == pytest.approx(tuple(np.percentile(steps[:, 1] / steps[:, 0], [10, 90])))
    assert found.attention_s == pytest.approx(times[:, 1].mean())
    assert found.memory == 39


def test_it_helps() -> None:
    schemes = summarise(outcomes(replace(BASE, attention_s=2.0, inter_bytes=400)))
    assert best_static(schemes) == "zigzag"
    assert verdict(schemes, UNEQUAL, 8) == (
        "DCP would make a step 1.50x as fast as the best static scheme, zigzag: attention is 2.00x as fast, and 75% "
        "fewer bytes travel between nodes."
    )


def test_the_spread_is_named() -> None:
    batches = [*outcomes(replace(BASE, attention_s=2.0)), *outcomes(replace(BASE, attention_s=3.0))]
    assert "zigzag (1.55x to 1.95x from batch to batch)" in verdict(summarise(batches), UNEQUAL, 8)


@pytest.mark.parametrize(
    ("zigzag", "lengths", "devices", "sentence"),
    [
        (replace(BASE, exposed_s=0.0), EQUAL, 8, "all sequences are about equally long and the link is fast enough to "
         "hide the exchanges of zigzag behind its compute"),
        (replace(BASE, exposed_s=0.01), UNEQUAL, 8, "the link is fast enough to hide the exchanges of zigzag behind "
         "its compute"),
        (replace(BASE, attention_s=0.05, exposed_s=0.04), UNEQUAL, 8, "attention is only 5% of a step"),
        (replace(BASE, attention_s=1.02), UNEQUAL, 8, "a step would be 1.01x as fast as with zigzag, too little for a "
         "change"),
        (replace(BASE, attention_s=5.0), UNEQUAL, 1, "on one device nothing has to travel"),
    ],
)  # fmt: skip
def test_it_does_not_help(zigzag: Outcome, lengths: np.ndarray, devices: int, sentence: str) -> None:
    found = verdict(summarise(outcomes(zigzag)), lengths, devices)
    assert found == f"DCP would not help here: {sentence}."


def test_short_rows_need_no_context_parallelism() -> None:
    assert not notes(np.array([1001]), 8000, 8)
    (note,) = notes(np.array([1000]), 8000, 8)
    assert note.startswith("The longest row fits the share of one device (1,000 tokens)")


def test_histogram_counts_every_row() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 5000, 1000)
    bins = histogram(lengths)
    assert sum(one.rows for one in bins) == 1000
    assert sum(one.tokens for one in bins) == lengths.sum()
    for one in bins:
        inside = lengths[(lengths >= one.low) & (lengths < one.high)]
        assert (one.rows, one.tokens) == (len(inside), inside.sum())
    assert all(a.high == b.low for a, b in itertools.pairwise(bins))
