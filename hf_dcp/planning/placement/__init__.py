"""Placement (first version: contiguous chunks; the search is being written)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_dcp.config import DcpConfig


@dataclass(frozen=True)
class Placement:
    name: str
    block_device: np.ndarray
    tile_device: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Layout:
    block_sizes: Any
    head_groups: int


def choose_layout(batch: Any, topology: Any, shape: Any, config: DcpConfig) -> Layout:
    size = config.block_size if config.block_size != "auto" else max(1, batch.num_tokens // (4 * topology.world_size))
    groups = config.head_groups if config.head_groups != "auto" else shape.kv_heads
    if shape.kv_heads % groups:
        raise ValueError(f"head_groups must divide kv_heads ({shape.kv_heads}), which {groups} does not")
    return Layout(int(size), int(groups))


def place(problem: Any, config: DcpConfig) -> tuple[Placement, Any]:
    n, world = len(problem.blocks), problem.topology.world_size
    device = (np.arange(n) * world // n).astype(np.int32)
    tile_device = tuple(np.repeat(device[t.q][:, None], problem.head_groups, 1) for t in problem.tiles)
    return Placement("ring", device, tile_device), None
