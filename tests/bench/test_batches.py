"""Batches of a benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_dcp.bench.batches import attended, read_batches, shortened, with_mask
from tests.planning.strategies import dense_mask


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([5, 6], [("0", [5, 6])]),
        ([[5], [6, 7]], [("0", [5]), ("1", [6, 7])]),
        ({"batches": [[5], [6]]}, [("0", [5]), ("1", [6])]),
        ({"batches": {"a": [5], "b": [6]}}, [("a", [5]), ("b", [6])]),
    ],
)
def test_forms(tmp_path: Path, content: Any, expected: list) -> None:
    file = tmp_path / "b.json"
    file.write_text(json.dumps(content))
    assert read_batches(file) == expected


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", "[[]]", "[[0]]", '[["x"]]', "[true]", '{"batches": 3}', "[[1], 2]"]
)
def test_wrong_contents(tmp_path: Path, content: str) -> None:
    file = tmp_path / "b.json"
    file.write_text(content)
    with pytest.raises(ValueError, match="--batches"):
        read_batches(file)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can't be read"):
        read_batches(tmp_path / "none.json")


def test_shortened() -> None:
    batches = [("a", [80, 3]), ("b", [16])]
    assert shortened(batches, 8, None) == [("a", [10, 1]), ("b", [2])]
    assert shortened(batches, 1, 1) == [("a", [80, 3])]
    with pytest.raises(ValueError, match="--divide"):
        shortened(batches, 0, None)
    with pytest.raises(ValueError, match="--limit"):
        shortened(batches, 1, 0)


@pytest.mark.parametrize("mask", ["causal", "lambda:2,5", "shared:0.2x4", "blockwise:4,2,1,1", "full"])
def test_attended(mask: str) -> None:
    batch = with_mask([30, 7, 30], mask)
    assert attended(batch) == int(np.count_nonzero(dense_mask(batch)))


def test_a_mask_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="8"):
        with_mask([7], "documents:3,5")
