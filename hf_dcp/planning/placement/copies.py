"""Batches that are several times the same: one copy is solved on its share of the devices, the others follow."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np

from hf_dcp.planning.batch import BatchSpec, Topology


@dataclass(frozen=True)
class Copies:
    """How a batch falls into equal parts."""

    count: int
    batch: BatchSpec
    """One part."""
    topology: Topology
    """The devices of one part, renumbered from 0."""
    source: np.ndarray
    """int64[sequences]: the sequence of the part that each sequence equals."""
    part: np.ndarray
    """int64[sequences]: the part that each sequence belongs to."""
    device: np.ndarray
    """int32[parts, devices of a part]: the real device of every renumbered one."""

    def expand_blocks(self, starts: list[np.ndarray]) -> list[np.ndarray]:
        """The block starts of every sequence, from those of the part's."""
        return [starts[s] for s in self.source]

    def expand(self, sequence: np.ndarray, value: np.ndarray) -> np.ndarray:
        """Devices of rows that are grouped by sequence (blocks, tiles), from those of the part.

        Args:
            sequence: int32[rows of the part], ascending.
            value: int32[rows of the part, ...], renumbered devices.
        """
        begin = np.searchsorted(sequence, np.arange(len(self.batch.lengths) + 1))
        chosen = [self.device[p][value[begin[s] : begin[s + 1]]] for s, p in zip(self.source, self.part, strict=True)]
        return np.concatenate(chosen)


def find_copies(batch: BatchSpec, topology: Topology) -> Copies | None:
    """The finest division of batch and devices into equal parts, or None."""
    members: dict[tuple[int, str], list[int]] = {}
    for s, (length, mask) in enumerate(zip(batch.lengths, batch.masks, strict=True)):
        members.setdefault((length, mask.key(length)), []).append(s)
    common = 0
    for same in members.values():
        common = gcd(common, len(same))
    order = np.argsort(topology.node, kind="stable").astype(np.int32)
    for count in range(min(common, topology.world_size), 1, -1):
        if common % count == 0 and topology.world_size % count == 0:
            device = order.reshape(count, -1)
            pattern = [_pattern(topology.node[row]) for row in device]
            if all(p == pattern[0] for p in pattern) and _keeps_nodes(topology.node, device):
                return _divide(batch, topology, members, device, pattern[0])
    return None


def _pattern(node: np.ndarray) -> tuple[int, ...]:
    """Nodes numbered as they first appear."""
    index: dict[int, int] = {}
    return tuple(index.setdefault(int(n), len(index)) for n in node)


def _keeps_nodes(node: np.ndarray, device: np.ndarray) -> bool:
    """Whether parts are made of whole nodes, or nodes of whole parts."""
    shared = [set(node[row].tolist()) for row in device]
    whole = all(len(nodes) == 1 for nodes in shared)
    return whole or sum(len(nodes) for nodes in shared) == len(set(node.tolist()))


def _divide(
    batch: BatchSpec,
    topology: Topology,
    members: dict[tuple[int, str], list[int]],
    device: np.ndarray,
    pattern: tuple[int, ...],
) -> Copies:
    count = len(device)
    source, part = np.zeros(len(batch.lengths), np.int64), np.zeros(len(batch.lengths), np.int64)
    first: list[int] = []
    for same in members.values():
        each = len(same) // count
        for i, s in enumerate(same):
            part[s], source[s] = i // each, same[i % each]
        first += same[:each]
    first.sort()
    source = np.searchsorted(first, source)
    lengths, masks = [batch.lengths[s] for s in first], [batch.masks[s] for s in first]
    one = Topology(pattern, topology.inter_cost, topology.intra_cost)
    return Copies(count, BatchSpec(lengths, masks), one, source, part, device)
