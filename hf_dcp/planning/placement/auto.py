"""Automatic block sizes and head groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_dcp.config import DcpConfig
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.limits import lpt_bound
from hf_dcp.planning.placement.pieces import segment_cuts
from hf_dcp.ranges import normalise

UNITS, UNITS_ALONE, UNITS_PER_BLOCK = 2000, 600, 8
"""A search may have this many tiles times head groups (a single sequence fewer: coarse blocks keep its parts whole), or
this many for every block."""
PARTS = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
"""Into how many blocks a device's mean tokens may be cut."""


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
    return Layout(outline.cut(outline.sizes(topology, groups, config)[0]), groups)


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
            parts = [a + _equal_parts(b - a, size) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]  # noqa: RUF007
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

    def sizes(self, topology: Topology, groups: int, config: DcpConfig) -> list[int]:
        """Block sizes to try, the best first: small as the number of tiles permits, and such that tokens can be even."""
        mean = self.batch.num_tokens / topology.world_size
        sizes = [max(1, round(mean / parts)) for parts in PARTS]
        chosen = 0
        while chosen + 1 < len(sizes) and self._few_tiles(sizes[chosen + 1], groups):
            chosen += 1
        near = sorted(range(len(sizes)), key=lambda i: (abs(i - chosen), i))
        even = [sizes[i] for i in near if self._even_tokens(sizes[i], topology, config)]
        finer = [size for size in sizes[chosen + 1 :] if size < sizes[chosen]]
        return list(dict.fromkeys([*even[:1], *(size for size in finer if size in even), sizes[-1]]))

    def _few_tiles(self, size: int, groups: int) -> bool:
        blocks = sum(len(starts) for starts in self.cut(size))
        most = UNITS_ALONE if len(self.batch.lengths) == 1 else UNITS
        return self.tiles(size) * groups <= max(most, UNITS_PER_BLOCK * blocks)

    def _even_tokens(self, size: int, topology: Topology, config: DcpConfig) -> bool:
        bounds = zip(self.cut(size), self.batch.lengths, strict=True)
        blocks = np.concatenate([np.diff(np.append(starts, length)) for starts, length in bounds])
        limit = int(self.batch.num_tokens / topology.world_size * (1 + config.token_tolerance))
        return lpt_bound(blocks, 1, topology.world_size, limit) <= limit


def heavy_cuts(ranges: np.ndarray) -> np.ndarray:
    """Tokens at which rows suddenly attend to several times as much: such rows are best kept in blocks of their own."""
    count = (ranges[:, :, 1] - ranges[:, :, 0]).sum(1, dtype=np.int64)
    jump = count[1:] > 4 * count[:-1] + 256
    found = np.flatnonzero(jump) + 1
    return found if len(found) <= 16 else np.zeros(0, np.int64)


def _equal_parts(length: int, size: int) -> np.ndarray:
    count = max(1, round(length / size))
    return np.arange(count, dtype=np.int64) * length // count
