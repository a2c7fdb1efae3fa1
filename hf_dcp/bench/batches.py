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


def read_json(option: str, file: Path, example: str) -> Any:
    """The content of a JSON file that was given for ``option``.

    Args:
        example: what could be in it, for the error line.

    Raises:
        ValueError: if the file can't be read, or is no JSON.
    """
    try:
        return json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{option} {file} can't be read ({error.strerror}): give a JSON file") from error
    except ValueError as error:
        raise ValueError(f"{option} {file} is no JSON ({error}): write {example}") from error


def read_batches(file: Path) -> list[Named]:
    """Names and lengths: of a list of lengths, a list of such lists, or either (also named) under ``batches``.

    Raises:
        ValueError: if the file can't be read, or holds something else.
    """
    content = read_json("--batches", file, "[[4096, 512], [300, 200]]")
    if isinstance(content, dict):
        content = content.get("batches")
    if isinstance(content, list) and content and not any(isinstance(x, list) for x in content):
        content = [content]
    entries: list[tuple[str, Any]] = []
    if isinstance(content, dict):
        entries = list(content.items())
    elif isinstance(content, list):
        entries = [(str(i), x) for i, x in enumerate(content)]
    if not entries or not all(isinstance(x, list) and x for _, x in entries):
        raise ValueError(f"--batches {file} must hold lists of lengths, such as [[4096, 512], [300, 200]]")
    for name, lengths in entries:
        require_lengths(f"--batches {file}: batch {name}", lengths)
    return entries


def require_lengths(where: str, lengths: Sequence[Any]) -> None:
    """Raises ValueError, which begins with ``where``, for what is no length."""
    for i, value in enumerate(lengths):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{where}: lengths[{i}] must be an integer of at least 1, not {value!r}")


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
    for i, (one, length) in enumerate(zip(batch.masks, batch.lengths, strict=True)):
        try:
            one.positions(length)
        except ValueError as error:
            raise ValueError(f"sequence {i}: {error}") from error
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
