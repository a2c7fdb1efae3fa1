"""The placement problem: tiles to be put on devices, and the rows they share with each other and with token blocks.

It is the hypergraph of the paper (section 4.2) with rows for blocks. The vertices are token blocks and **units**: a tile of one
head group. The nets are **atoms** of one head group: rows that are wanted by the same tiles, on the Q side (Q, dO, and
the partial O and dQ that come back: they share their owner) or on the KV side. A net costs its bytes times
(devices that touch it, its owner included, minus one); and again for nodes. Head groups have equal structure, so arrays
are kept for one group: unit ``t * G + g`` touches the nets ``atom * G + g`` of all atoms of tile ``t``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numba as nb
import numpy as np

from hf_dcp.config import DcpConfig
from hf_dcp.planning.batch import BatchSpec, ModelShape, RowBytes, Topology
from hf_dcp.planning.limits import Limits, find_limits
from hf_dcp.planning.tiles import Blocks, Tiles

Q_SIDE, KV_SIDE = 0, 1


@dataclass(frozen=True)
class Placement:
    """Where token blocks live and tiles are computed."""

    name: str
    """How it was found."""
    block_device: np.ndarray
    """int32[blocks]"""
    tile_device: tuple[np.ndarray, ...]
    """int32[tiles, head_groups] for each window."""


@dataclass(frozen=True)
class Links:
    """Which members every group has, and back: rows of a sparse 0/1 matrix."""

    ptr: np.ndarray
    """int64[groups + 1]"""
    member: np.ndarray
    """int32[...], ascending inside a group."""


@dataclass(frozen=True)
class Problem:
    """All windows of a batch as one problem; windows, sides and head groups only show in the numbering."""

    batch: BatchSpec
    blocks: Blocks
    tiles: tuple[Tiles, ...]
    shape: ModelShape
    head_groups: int
    config: DcpConfig
    topology: Topology

    tile_q: np.ndarray
    """int32[tiles]: query block of every tile, windows one behind the other."""
    tile_kv: np.ndarray
    """int32[tiles]: KV block."""
    tile_work: np.ndarray
    """int64[tiles]: attended elements times query heads of a group times layers."""
    tile_window: np.ndarray
    """int64[windows + 1]: first tile of each window."""
    tile_atoms: Links
    """The atoms of every tile: first those of its query block, then those of its KV block."""
    atom_tiles: Links
    """The tiles of every atom."""
    block_atoms: Links
    """The atoms of every block."""
    block_tiles: Links
    """The tiles of every query block."""
    atom_block: np.ndarray
    """int32[atoms]"""
    atom_rows: np.ndarray
    """int64[atoms]: tokens."""
    atom_weight: np.ndarray
    """int64[atoms]: bytes of forward and backward, all layers, when one more device takes part."""
    atom_side: np.ndarray
    """int8[atoms]: `Q_SIDE` or `KV_SIDE`."""
    atom_window: np.ndarray
    """int64[2 * windows + 1]: first atom of each window's Q side, KV side, and so on."""
    limits: Limits

    @property
    def num_tiles(self) -> int:
        return len(self.tile_q)

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    def placement(self, name: str, block_device: np.ndarray, unit_device: np.ndarray) -> Placement:
        """A placement from the device of every unit: int32[tiles, head_groups], all windows."""
        parts = np.split(unit_device.reshape(-1, self.head_groups).astype(np.int32), self.tile_window[1:-1])
        return Placement(name, block_device.astype(np.int32), tuple(parts))

    def unit_device(self, placement: Placement) -> np.ndarray:
        """int32[tiles, head_groups] of a placement, windows one behind the other."""
        return np.concatenate(placement.tile_device).astype(np.int32)


def costed_passes(config: DcpConfig) -> tuple[str, str]:
    """The passes whose bytes are minimised."""
    return ("forward", "backward" if config.backward_kv == "refetch" else "backward_keep")


def side_bytes(row: RowBytes, name: str) -> tuple[int, int]:
    """Bytes per (Q row, KV row) of one group, to the tiles and back, in the named pass."""
    inputs, partials = row.inputs(name), row.partials(name)
    return inputs[0] + partials[0], inputs[1] + partials[1]


def build_problem(
    batch: BatchSpec,
    blocks: Blocks,
    tiles: Sequence[Tiles],
    shape: ModelShape,
    head_groups: int,
    config: DcpConfig,
    topology: Topology,
) -> Problem:
    """
    Args:
        tiles: one entry per window of ``shape``.

    Raises:
        ValueError: if ``head_groups`` doesn't divide the KV heads.
    """
    if head_groups < 1 or shape.kv_heads % head_groups:
        raise ValueError(f"head_groups must divide kv_heads ({shape.kv_heads}), which {head_groups} does not")
    row = RowBytes.of(shape, head_groups, config.reduce_dtype)
    costs = np.array([side_bytes(row, name) for name in costed_passes(config)]).sum(0)
    layers = [count for _, count in shape.windows]
    sides = [atoms for part in tiles for atoms in (part.q_atoms, part.kv_atoms)]
    counts = np.array([len(atoms.begin) for atoms in sides], np.int64)
    atom_window = np.concatenate([[0], np.cumsum(counts)])
    side = np.tile(np.array([Q_SIDE, KV_SIDE], np.int8), len(tiles))
    rows = np.concatenate([atoms.end - atoms.begin for atoms in sides])
    atom_side = np.repeat(side, counts)
    tile_atoms = _tile_atoms(tiles, atom_window)
    atom_block = np.concatenate([atoms.block for atoms in sides]).astype(np.int32)
    tile_q = np.concatenate([part.q for part in tiles])
    heads = shape.heads // head_groups
    tile_work = np.concatenate([part.area * (heads * n) for part, n in zip(tiles, layers, strict=True)])
    return Problem(
        batch=batch,
        blocks=blocks,
        tiles=tuple(tiles),
        shape=shape,
        head_groups=head_groups,
        config=config,
        topology=topology,
        tile_q=tile_q,
        tile_kv=np.concatenate([part.kv for part in tiles]),
        tile_work=tile_work,
        tile_window=np.concatenate([[0], np.cumsum([len(part) for part in tiles])]),
        tile_atoms=tile_atoms,
        atom_tiles=Links(*_transposed(tile_atoms.ptr, tile_atoms.member, len(rows))),
        block_atoms=_grouped(atom_block, len(blocks)),
        block_tiles=_grouped(tile_q, len(blocks)),
        atom_block=atom_block,
        atom_rows=rows,
        atom_weight=rows * costs[atom_side] * np.repeat(layers, 2).repeat(counts),
        atom_side=atom_side,
        atom_window=atom_window,
        limits=find_limits(tile_work, head_groups, blocks.size, topology, config),
    )


def _tile_atoms(tiles: Sequence[Tiles], atom_window: np.ndarray) -> Links:
    parts = []
    for w, part in enumerate(tiles):
        q, kv = part.q_atoms, part.kv_atoms
        parts.append(_interleaved(q.tile_ptr, q.tile_atom, kv.tile_ptr, kv.tile_atom, *atom_window[2 * w : 2 * w + 2]))
    counts = np.concatenate([np.diff(ptr) for ptr, _ in parts])
    return Links(np.concatenate([[0], np.cumsum(counts)]), np.concatenate([member for _, member in parts]))


@nb.njit(cache=True)
def _interleaved(q_ptr, q_atom, kv_ptr, kv_atom, q_offset, kv_offset):
    """Q atoms, then KV atoms of every tile, numbered from the offsets."""
    tiles = len(q_ptr) - 1
    ptr, member = np.empty(tiles + 1, np.int64), np.empty(len(q_atom) + len(kv_atom), np.int32)
    at = 0
    ptr[0] = 0
    for t in range(tiles):
        for p in range(q_ptr[t], q_ptr[t + 1]):
            member[at] = q_atom[p] + q_offset
            at += 1
        for p in range(kv_ptr[t], kv_ptr[t + 1]):
            member[at] = kv_atom[p] + kv_offset
            at += 1
        ptr[t + 1] = at
    return ptr, member


@nb.njit(cache=True)
def _transposed(ptr, member, groups):
    """The rows that hold each member, ascending."""
    new_ptr = np.zeros(groups + 1, np.int64)
    for m in member:
        new_ptr[m + 1] += 1
    for i in range(groups):
        new_ptr[i + 1] += new_ptr[i]
    at, new_member = new_ptr.copy(), np.empty(len(member), np.int32)
    for row in range(len(ptr) - 1):
        for p in range(ptr[row], ptr[row + 1]):
            new_member[at[member[p]]] = row
            at[member[p]] += 1
    return new_ptr, new_member


def _grouped(group_of: np.ndarray, groups: int) -> Links:
    """The elements of every group, from the group of every element."""
    return Links(*_transposed(np.arange(len(group_of) + 1), group_of, groups))
