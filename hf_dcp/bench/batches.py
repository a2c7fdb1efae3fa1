"""The batches of a benchmark, from text and files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_dcp.masks import normalise, parse_mask
from hf_dcp.planning.batch import BatchSpec

Named = tuple[str, list[int]]


def read_batches(file: Path) -> list[Named]:
    """Names and lengths: of a list of lengths, a list of such lists, or either (also named) under ``batches``.

    Raises:
        ValueError: if the file can't be read, or holds something else.
    """
    try:
        content = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"--batches {file} can't be read ({error.strerror}): give a JSON file") from error
    except ValueError as error:
        raise ValueError(f"--batches {file} is no JSON ({error}): write [[4096, 512], [300, 200]]") from error
    if isinstance(content, dict):
        content = content.get("batches")
    if isinstance(content, list) and content and all(_is_length(x) for x in content):
        content = [content]
    entries: list[tuple[str, Any]] = []
    if isinstance(content, dict):
        entries = list(content.items())
    elif isinstance(content, list):
        entries = [(str(i), x) for i, x in enumerate(content)]
    if not entries or not all(isinstance(x, list) and x and all(_is_length(n) for n in x) for _, x in entries):
        raise ValueError(f"--batches {file} must hold lists of lengths, such as [[4096, 512], [300, 200]]")
    return entries


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def shortened(batches: Sequence[Named], divide: int, limit: int | None) -> list[Named]:
    """The first ``limit`` batches, lengths divided by ``divide`` (at least 1).

    Raises:
        ValueError: if either is below 1.
    """
    for option, value in (("--divide", divide), ("--limit", limit)):
        if value is not None and value < 1:
            raise ValueError(f"{option} must be an integer of at least 1, not {value}")
    return [(name, [max(1, length // divide) for length in lengths]) for name, lengths in batches[:limit]]


def with_mask(lengths: Sequence[int], mask: str) -> BatchSpec:
    """Raises ValueError for a mask that doesn't fit a length."""
    batch = BatchSpec(lengths, parse_mask(mask))
    for one, length in zip(batch.masks, batch.lengths, strict=True):
        one.positions(length)
    return batch


def attended(batch: BatchSpec) -> int:
    """Attended (query, key) pairs of all sequences."""
    known: dict[tuple[str, int], int] = {}
    total = 0
    for mask, length in zip(batch.masks, batch.lengths, strict=True):
        key = (mask.key(length), length)
        if key not in known:
            known[key] = int(np.diff(normalise(mask.ranges(length)).astype(np.int64), axis=2).sum())
        total += known[key]
    return total
