"""Which rows every device uses but doesn't own, where they come from, and in which slots they lie."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hf_dcp.planning.batch import Topology
from hf_dcp.planning.routing import choose_gateways
from hf_dcp.planning.tiles import Atoms, Blocks


@dataclass(frozen=True)
class LocalRows:
    """Which device owns each token, and as its how-manieth token."""

    device: np.ndarray
    """int32[blocks]: the owner of each block."""
    start: np.ndarray
    """int64[blocks]: local index of the block's first token on its owner."""
    count: np.ndarray
    """int64[world_size]: tokens of each device."""

    @classmethod
    def of(cls, blocks: Blocks, device: np.ndarray, world_size: int) -> LocalRows:
        order = np.argsort(device, kind="stable")  # blocks ascend, so local tokens do too
        before = np.cumsum(blocks.size[order]) - blocks.size[order]
        count = np.bincount(device, weights=blocks.size, minlength=world_size).astype(np.int64)
        start = np.empty(len(blocks), np.int64)
        start[order] = before - (np.cumsum(count) - count)[device[order]]
        return cls(device, start, count)

    def slot(self, block: np.ndarray, token_in_block: np.ndarray, group: np.ndarray, head_groups: int) -> np.ndarray:
        """Slot, on its owner, of the row of this token and group."""
        return (self.start[block] + token_in_block) * head_groups + group


@dataclass(frozen=True)
class Uses:
    """Remote rows of one side: every (device, group, atom) that a device uses but doesn't own, in that order."""

    device: np.ndarray
    """int32[uses]"""
    group: np.ndarray
    """int32[uses]"""
    atom: np.ndarray
    """int64[uses]"""
    source: np.ndarray
    """int32[uses]: the device that the rows come from: their owner, or the gateway of this node."""
    via: np.ndarray
    """int64[uses]: the use of the gateway that relays the rows; -1 where they come from their owner."""
    slot: np.ndarray
    """int64[uses]: slot of the first row on ``device``."""
    source_slot: np.ndarray
    """int64[uses]: slot of the first row on ``source``."""
    count: np.ndarray
    """int64[uses]: rows."""
    token: np.ndarray
    """int64[uses]: batch-global token of the first row."""
    index: np.ndarray
    """int64[world_size * groups * atoms]: dense (device, group, atom) -> use, or -1."""

    def first_slot(self, key: np.ndarray, local_slot: np.ndarray) -> np.ndarray:
        """Slots of rows that begin an atom: those of the use where there is one, else the local ones."""
        use = self.index[key]
        return np.where(use < 0, local_slot, self.slot[use] if len(self.slot) else 0)


def find_uses(
    atoms: Atoms, tile_device: np.ndarray, blocks: Blocks, local: LocalRows, topology: Topology, row_bytes: int
) -> Uses:
    """Collect the uses of one side and route them.

    Args:
        tile_device: int32[tiles, groups], where each tile is computed.
        row_bytes: bytes that one row of this side costs over forward and backward; gateways are balanced by it.
    """
    groups, num_atoms, world = tile_device.shape[1], len(atoms.begin), topology.world_size
    tile_of = np.repeat(np.arange(len(tile_device)), np.diff(atoms.tile_ptr))
    device = tile_device[tile_of].astype(np.int64)
    key_of = (device * groups + np.arange(groups)) * num_atoms + atoms.tile_atom[:, None]
    remote = device != local.device[atoms.block[atoms.tile_atom]][:, None]
    used = np.zeros(world * groups * num_atoms, bool)
    used[key_of[remote]] = True
    key = np.flatnonzero(used)
    index = np.where(used, np.cumsum(used) - 1, -1)
    atom, group, on = key % num_atoms, key // num_atoms % groups, key // (num_atoms * groups)
    count = atoms.end[atom] - atoms.begin[atom]
    slot = np.cumsum(count) - count
    first_of_device = np.searchsorted(on, np.arange(world))
    rows_before = np.append(slot, count.sum())[first_of_device]
    slot = slot - rows_before[on] + local.count[on] * groups
    source = _route(atom * groups + group, on, local.device[atoms.block], count * row_bytes, groups, topology)
    owner = local.device[atoms.block[atom]]
    via = np.where(source == owner, -1, index[(source * groups + group) * num_atoms + atom])
    block = atoms.block[atom]
    at_owner = local.slot(block, atoms.begin[atom] - blocks.start[block], group, groups)
    source_slot = np.where(via < 0, at_owner, slot[via] if len(slot) else 0)
    return Uses(
        device=on.astype(np.int32),
        group=group.astype(np.int32),
        atom=atom,
        source=source,
        via=via,
        slot=slot,
        source_slot=source_slot,
        count=count,
        token=atoms.begin[atom],
        index=index,
    )


def _route(
    net: np.ndarray, device: np.ndarray, atom_owner: np.ndarray, weight: np.ndarray, groups: int, topology: Topology
) -> np.ndarray:
    """The device that each use receives its rows from: int32[uses]."""
    order = np.lexsort((device, net))
    owner = np.repeat(atom_owner, groups)
    net_weight = np.zeros(len(owner), np.int64)
    net_weight[net] = weight
    source = np.empty(len(net), np.int32)
    source[order] = choose_gateways(
        net[order], device[order].astype(np.int32), owner, net_weight, topology.node, topology.world_size
    )
    return source


def remote_rows(uses: Uses, world_size: int) -> list[np.ndarray]:
    """int32[runs, 3] of (token, count, group) for every device, in slot order, neighbouring atoms joined."""
    joined = np.zeros(len(uses.device), bool)
    if len(joined):
        same = (uses.device[1:] == uses.device[:-1]) & (uses.group[1:] == uses.group[:-1])
        joined[1:] = same & (uses.token[1:] == uses.token[:-1] + uses.count[:-1])
    first = np.flatnonzero(~joined)
    rows = np.add.reduceat(uses.count, first) if len(first) else np.zeros(0, np.int64)
    table = np.stack([uses.token[first], rows, uses.group[first]], 1).astype(np.int32)
    return np.split(table, np.searchsorted(uses.device[first], np.arange(1, world_size)))


def token_runs(blocks: Blocks, device: np.ndarray, world_size: int) -> list[np.ndarray]:
    """int32[runs, 2] of (token, count) that every device owns, ascending, neighbouring blocks joined."""
    order = np.argsort(device, kind="stable")
    start, size, on = blocks.start[order], blocks.size[order], device[order]
    first = np.flatnonzero(np.append(True, (on[1:] != on[:-1]) | (start[1:] != start[:-1] + size[:-1])))
    table = np.stack([start[first], np.add.reduceat(size, first)], 1).astype(np.int32)
    return np.split(table, np.searchsorted(on[first], np.arange(1, world_size)))
