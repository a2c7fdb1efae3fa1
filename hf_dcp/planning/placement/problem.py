"""The placement problem (first version: only its parts; nets are being written)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    batch: Any
    blocks: Any
    tiles: tuple
    shape: Any
    head_groups: int
    config: Any
    topology: Any


def build_problem(batch, blocks, tiles, shape, head_groups, config, topology) -> Problem:
    return Problem(batch, blocks, tiles, shape, head_groups, config, topology)
