"""Automatic block sizes and head groups."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hf_dcp.config import DcpConfig
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology


@dataclass(frozen=True)
class Layout:
    """Into which pieces a batch is cut."""

    block_sizes: int | list[int | np.ndarray]
    """For `make_blocks`."""
    head_groups: int


def choose_layout(batch: BatchSpec, topology: Topology, shape: ModelShape, config: DcpConfig) -> Layout:
    """The pieces for a batch; settings other than ``"auto"`` are taken as they are.

    Raises:
        ValueError: if ``config.head_groups`` doesn't divide the KV heads.
    """
    groups = shape.kv_heads if config.head_groups == "auto" else config.head_groups
    if shape.kv_heads % groups:
        raise ValueError(f"head_groups must divide kv_heads ({shape.kv_heads}), which {groups} does not")
    if config.block_size != "auto":
        return Layout(config.block_size, groups)
    size = max(1, batch.num_tokens // (8 * topology.world_size))
    return Layout(size, groups)
