"""Automatic block sizes and head groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_dcp.config import DcpConfig
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.placement.pieces import segment_cuts
from hf_dcp.ranges import normalise

UNITS = 5000
"""Blocks are as small as this many tiles times head groups permit."""
FINEST = 16
"""Most blocks that make up a device's mean tokens."""
COARSEST = 2
"""Fewest of them in a search."""


@dataclass(frozen=True)
class Layout:
    """Into which pieces a batch is cut."""

    block_sizes: int | Sequence[int | np.ndarray]
    """For `make_blocks`."""
    head_groups: int


def head_groups(shape: ModelShape, config: DcpConfig) -> int:
    """One group for every KV head, unless the settings say otherwise.

    Raises:
        ValueError: if ``config.head_groups`` doesn't divide the KV heads.
    """
    groups = shape.kv_heads if config.head_groups == "auto" else config.head_groups
    if shape.kv_heads % groups:
        raise ValueError(f"head_groups must divide kv_heads ({shape.kv_heads}), which {groups} does not")
    return groups


def choose_layout(batch: BatchSpec, topology: Topology, shape: ModelShape, config: DcpConfig) -> Layout:
    """The pieces for a batch; settings other than ``"auto"`` are taken as they are.

    Raises:
        ValueError: if ``config.head_groups`` doesn't divide the KV heads.
    """
    groups = head_groups(shape, config)
    if config.block_size != "auto":
        return Layout(config.block_size, groups)
    outline = Outline(batch)
    return Layout(outline.cut(outline.best_size(topology, groups)), groups)


class Outline:
    """What is known of a batch without tiles: segments of its sequences, and how many tiles a block size would make."""

    def __init__(self, batch: BatchSpec) -> None:
        self.batch = batch
        self._shape: dict[tuple[int, str], tuple[np.ndarray, np.ndarray]] = {}

    def _of(self, s: int) -> tuple[np.ndarray, np.ndarray]:
        """(Segment starts, sampled ranges) of a sequence."""
        length, mask = self.batch.lengths[s], self.batch.masks[s]
        key = (length, mask.key(length))
        if key not in self._shape:
            ranges = normalise(mask.ranges(length))
            cuts = np.unique(np.concatenate([[0], segment_cuts(ranges), heavy_cuts(ranges)]))
            self._shape[key] = (cuts, ranges[:: max(1, length // 4096)])
        return self._shape[key]

    def cut(self, size: int) -> list[np.ndarray]:
        """Block starts of every sequence: each segment in equal blocks of about ``size`` tokens."""
        result = []
        for s, length in enumerate(self.batch.lengths):
            bounds = np.append(self._of(s)[0], length)
            parts = [a + _equal_parts(b - a, size) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
            result.append(np.concatenate(parts))
        return result

    def tiles(self, size: int) -> int:
        """About how many tiles blocks of this size make."""
        total = 0
        for s, length in enumerate(self.batch.lengths):
            ranges = self._of(s)[1]
            rows_per_sample = length / len(ranges)
            full = ranges[:, :, 1] > ranges[:, :, 0]
            touched = np.where(full, (ranges[:, :, 1] - 1) // size - ranges[:, :, 0] // size + 1, 0).sum()
            total += max(-(-length // size), int(touched * rows_per_sample / size))
        return total

    def best_size(self, topology: Topology, groups: int) -> int:
        """The smallest block size with an acceptable number of tiles."""
        mean = self.batch.num_tokens / topology.world_size
        parts = COARSEST
        while parts < FINEST and self.tiles(max(1, int(mean / (2 * parts)))) * groups <= UNITS:
            parts *= 2
        return max(1, int(mean / parts))


def heavy_cuts(ranges: np.ndarray) -> np.ndarray:
    """Tokens at which rows suddenly attend to several times as much: such rows are best kept in blocks of their own."""
    count = (ranges[:, :, 1] - ranges[:, :, 0]).sum(1, dtype=np.int64)
    jump = count[1:] > 4 * count[:-1] + 256
    found = np.flatnonzero(jump) + 1
    return found if len(found) <= 16 else np.zeros(0, np.int64)


def _equal_parts(length: int, size: int) -> np.ndarray:
    count = max(1, round(length / size))
    return np.arange(count, dtype=np.int64) * length // count
