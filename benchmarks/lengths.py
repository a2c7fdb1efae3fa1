"""Batches of sequence lengths that resemble public data sets: the same for the same seed, on every machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

TABLES = Path(__file__).parent / "data" / "lengths.json"
CHUNK = 4096
"""Lengths drawn at a time."""
MIN_FILL = 0.75
"""Batches emptier than this are dropped."""


@dataclass(frozen=True)
class Distribution:
    """The quantile function of a data set's lengths, by its knots."""

    percent: np.ndarray
    """float64[knots], from 0 to 100."""
    length: np.ndarray
    """float64[knots], tokens."""

    def at(self, share: np.ndarray) -> np.ndarray:
        """Lengths at shares of 0 to 1, real numbers: between knots the share and the logarithm of the length are in
        proportion."""
        return np.exp(np.interp(100 * share, self.percent, np.log(np.maximum(self.length, 1))))


def read_distributions(file: Path = TABLES) -> dict[str, Distribution]:
    """All data sets of a file of tables."""
    tables = json.loads(file.read_text("utf-8"))["datasets"]
    knots = {name: np.array(table["q"], np.float64).T for name, table in tables.items()}
    return {name: Distribution(percent, length) for name, (percent, length) in knots.items()}


def batches(lengths: Distribution, scale: float, tokens: int, seed: int) -> Iterator[list[int]]:
    """Batches without end: lengths times ``scale`` in the order drawn, until the next would pass ``tokens``.

    Sequences longer than a batch are left out, and so are batches less than `MIN_FILL` full.

    Raises:
        ValueError: if hardly any sequence fits in a batch.
    """
    rng = np.random.default_rng(seed)
    batch: list[int] = []
    while True:
        drawn = np.maximum(1, np.rint(scale * np.rint(lengths.at(rng.random(CHUNK))))).astype(np.int64)
        fitting = drawn[drawn <= tokens].tolist()
        if not fitting:
            raise ValueError(f"no sequence of at most {tokens} tokens at scale {scale}: choose a smaller one")
        for length in fitting:
            if sum(batch) + length > tokens:
                if sum(batch) >= MIN_FILL * tokens:
                    yield batch
                batch = []
            batch.append(length)
