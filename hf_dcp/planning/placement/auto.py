"""Automatic block sizes and head groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numba as nb
import numpy as np

from hf_dcp.config import DcpConfig
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.limits import lpt_bound
from hf_dcp.planning.placement.pieces import segment_cuts

UNITS, UNITS_ALONE, UNITS_PER_BLOCK = 2000, 600, 8
"""A search may have this many tiles times head groups (a single sequence fewer: coarse blocks keep its parts whole), or
this many for every block."""
PARTS = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
"""Into how many blocks a device's mean tokens may be cut."""
MANY_DEVICES = 128
"""More devices than this may get one block each: tiles grow with the square of blocks."""
MOST_GROUPS, MOST_GROUPS_SHARED = 16, 4
"""Most head groups; and where several query heads share a KV head, so that Q is heavy, and lengths are mixed."""
SLOT_SHARE = 0.9
"""Blocks of several sequences use this share of the tolerance in tokens."""
SAMPLES = 4096
"""About so many rows of a sequence tell how many tiles it makes."""
MOST_HEAVY = 16
"""With more places than this where rows become heavy, none is treated in a special way."""


@dataclass(frozen=True)
class Layout:
    """Into which pieces a batch is cut."""

    block_sizes: int | Sequence[int | np.ndarray]
    """For `make_blocks`."""
    head_groups: int


def head_groups(batch: BatchSpec, shape: ModelShape, config: DcpConfig) -> int:
    """The number of head groups: that of the settings, or what costs least as measured (see docs/design.md).

    One per KV head gives the search most freedom; but many groups leave it only coarse blocks. Joint heads, one group, cost
    some per cent less on windows and far more elsewhere.

    Raises:
        ValueError: if ``config.head_groups`` doesn't divide the KV heads.
    """
    kv_heads = shape.kv_heads
    if config.head_groups != "auto":
        if kv_heads % config.head_groups:
            raise ValueError(f"head_groups must divide kv_heads ({kv_heads}), which {config.head_groups} does not")
        return config.head_groups
    shared = shape.heads > kv_heads and len(batch.lengths) > 1
    most = MOST_GROUPS_SHARED if shared else MOST_GROUPS
    return max(n for n in range(1, most + 1) if kv_heads % n == 0)


def choose_layout(batch: BatchSpec, topology: Topology, shape: ModelShape, config: DcpConfig) -> Layout:
    """The pieces for a batch; settings other than ``"auto"`` are taken as they are.

    Raises:
        ValueError: if ``config.head_groups`` doesn't divide the KV heads.
    """
    groups = head_groups(batch, shape, config)
    if config.block_size != "auto":
        return Layout(config.block_size, groups)
    outline = Outline(batch, config.token_tolerance, topology.world_size)
    return Layout(outline.cut(outline.sizes(topology, groups, config)[0]), groups)


class Outline:
    """What is known of a batch without tiles: segments of its sequences, and how many tiles a block size would make."""

    def __init__(self, batch: BatchSpec, tolerance: float, devices: int) -> None:
        self.batch, self.tolerance = batch, tolerance
        self.many = devices > MANY_DEVICES
        known: dict[int, np.ndarray] = {}
        for ranges in batch.ranges:
            if id(ranges) not in known:  # equal sequences share one array
                known[id(ranges)] = np.unique(np.concatenate([[0], segment_cuts(ranges), heavy_cuts(ranges)]))
        periods = {id(ranges): _period(ranges) for ranges in {id(ranges): ranges for ranges in batch.ranges}.values()}
        self.periods = [periods[id(ranges)] for ranges in batch.ranges]
        """After how many tokens the mask of every sequence makes a step; 1 if it makes none."""
        self.segments = [known[id(ranges)] for ranges in batch.ranges]
        """First tokens of the segments of every sequence."""

    def cut(self, size: int) -> list[np.ndarray]:
        """Block starts of every sequence, each segment cut alone: a single sequence in equal blocks of about ``size`` tokens.

        Several in blocks of which a device can hold as many as of ``size``, tolerance used, and a shorter one at the end:
        any block may change places with another, and short ones even out what is left.
        """
        if len(self.batch.lengths) == 1:
            parts = _equal_parts
        else:
            parts, size = _full_parts, max(1, int(size * (1 + SLOT_SHARE * self.tolerance)))
        result = []
        for begins, period, length in zip(self.segments, self.periods, self.batch.lengths, strict=True):
            ends, stepped = np.append(begins[1:], length), size
            if parts is _full_parts and period > 1:
                stepped = size - size % period if size >= period else -(-period // -(-period // size))
            result.append(np.concatenate([a + parts(b - a, stepped) for a, b in zip(begins, ends, strict=True)]))
        return result

    def blocks(self, size: int) -> np.ndarray:
        """Tokens of all blocks of `cut`."""
        return np.concatenate(
            [np.diff(np.append(cut, length)) for cut, length in zip(self.cut(size), self.batch.lengths, strict=True)]
        )

    def tiles(self, size: int) -> int:
        """About how many tiles blocks of this size make."""
        known: dict[int, int] = {}
        total = 0
        for length, ranges in zip(self.batch.lengths, self.batch.ranges, strict=True):
            if id(ranges) not in known:
                touched = _blocks_touched(ranges, size, max(1, length // SAMPLES))
                known[id(ranges)] = max(-(-length // size), touched // size)
            total += known[id(ranges)]
        return total

    def sizes(self, topology: Topology, groups: int, config: DcpConfig) -> list[int]:
        """Block sizes to try, the best first: small as the number of tiles permits, and such that tokens can be even."""
        mean = self.batch.num_tokens / topology.world_size
        sizes = [max(1, round(mean / parts)) for parts in ((1, *PARTS) if self.many else PARTS)]
        chosen = 0
        while chosen + 1 < len(sizes) and self._few_tiles(sizes[chosen + 1], groups):
            chosen += 1
        near = sorted(range(len(sizes)), key=lambda i: (abs(i - chosen), i))
        even = [sizes[i] for i in near if self._even_tokens(sizes[i], topology, config)]
        finer = [size for size in sizes[chosen + 1 :] if size < sizes[chosen]]
        return list(dict.fromkeys([*even[:1], *(size for size in finer if size in even), sizes[-1]]))

    def _few_tiles(self, size: int, groups: int) -> bool:
        blocks = sum(
            max(1, round(n / size))
            for begins, length in zip(self.segments, self.batch.lengths, strict=True)
            for n in np.diff(np.append(begins, length)).tolist()
        )
        most = UNITS_ALONE if len(self.batch.lengths) == 1 else UNITS
        return self.tiles(size) * groups <= max(most, UNITS_PER_BLOCK * blocks)

    def _even_tokens(self, size: int, topology: Topology, config: DcpConfig) -> bool:
        limit = int(self.batch.num_tokens / topology.world_size * (1 + config.token_tolerance))
        return lpt_bound(self.blocks(size), 1, topology.world_size, limit) <= limit


def heavy_cuts(ranges: np.ndarray) -> np.ndarray:
    """Tokens at which rows suddenly attend to several times as much: such rows are best kept in blocks of their own."""
    return _heavy_begins(ranges, MOST_HEAVY)


@nb.njit(cache=True)
def _heavy_begins(ranges, most):
    found, before = np.empty(most, np.int64), 0
    count = 0
    for i in range(len(ranges)):
        attended = 0
        for c in range(ranges.shape[1]):
            attended += ranges[i, c, 1] - ranges[i, c, 0]
        if i > 0 and attended > 4 * before + 256:
            if count == most:
                return found[:0]
            found[count] = i
            count += 1
        before = attended
    return found[:count]


@nb.njit(cache=True)
def _period(ranges):
    """The greatest common divisor of the rows at which ranges begin to begin elsewhere by more than a token."""
    period = 0
    for i in range(1, len(ranges)):
        for c in range(ranges.shape[1]):
            used = ranges[i, c, 0] < ranges[i, c, 1] and ranges[i - 1, c, 0] < ranges[i - 1, c, 1]
            if used and abs(ranges[i, c, 0] - ranges[i - 1, c, 0]) > 1:
                a, b = period, i
                while b > 0:
                    a, b = b, a % b
                period = a
    return max(period, 1)


@nb.njit(cache=True)
def _blocks_touched(ranges, size, step):
    """About how many (row, block of this many rows) pairs have an attended element; every ``step``-th row is looked at."""
    total, rows = 0, 0
    for i in range(0, len(ranges), step):
        rows += 1
        for c in range(ranges.shape[1]):
            if ranges[i, c, 1] > ranges[i, c, 0]:
                total += (ranges[i, c, 1] - 1) // size - ranges[i, c, 0] // size + 1
    return total * len(ranges) // max(rows, 1)


def _equal_parts(length: int, size: int) -> np.ndarray:
    count = max(1, round(length / size))
    return np.arange(count, dtype=np.int64) * length // count


def _full_parts(length: int, size: int) -> np.ndarray:
    return np.arange(0, length, size, dtype=np.int64)
