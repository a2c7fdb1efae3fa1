"""Rows that travel in one pass, and the tiles that they are for, as compiled functions want them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numba as nb
import numpy as np

from hf_dcp.planning.batch import Topology
from hf_dcp.planning.tiles import Atoms, Tiles
from hf_dcp.planning.uses import Uses

INSIDE, BETWEEN, RELAYED = 1, 2, 3
"""Where rows come from: the own node, another node, a gateway."""


class Transfers(NamedTuple):
    """The uses of Q rows, then those of KV rows; see `Uses`.

    A **unit** is a tile of one head group: ``tile * groups + group``.
    """

    unit_ptr: np.ndarray
    """int64[units + 1]"""
    unit_use: np.ndarray
    """int32[...]: the uses of every unit."""
    num_q: int
    """How many of the uses are of Q rows."""
    device: np.ndarray
    """int32[uses]: who needs the rows."""
    source: np.ndarray
    """int32[uses]: who sends them."""
    via: np.ndarray
    """int64[uses]: the gateway's use of the same rows; -1 where they come from their owner."""
    kind: np.ndarray
    """int8[uses]: `INSIDE`, `BETWEEN`: straight from the owner; `RELAYED`."""
    inputs: np.ndarray
    """int64[uses]: bytes towards the tiles."""
    partials: np.ndarray
    """int64[uses]: bytes of partial results; 0: there are none."""

    @classmethod
    def of(cls, sides: tuple[Uses, Uses], tiles: Tiles, tile_device: np.ndarray, topology: Topology) -> Transfers:
        """Of a pass that is still open: without bytes.

        Args:
            sides: the uses of Q rows and of KV rows.
            tile_device: int32[tiles, groups].
        """
        q, kv = sides
        device, source = (np.concatenate([getattr(q, name), getattr(kv, name)]) for name in ("device", "source"))
        via = np.concatenate([q.via, np.where(kv.via >= 0, kv.via + len(q.via), -1)])
        foreign = topology.node[source] != topology.node[device]
        kind = np.where(via >= 0, RELAYED, np.where(foreign, BETWEEN, INSIDE)).astype(np.int8)
        ptr, use = _uses_of_units(tile_device, *_lookup(q, tiles.q_atoms), *_lookup(kv, tiles.kv_atoms), len(q.via))
        nothing = np.zeros(0, np.int64)
        return cls(ptr, use, len(q.via), device, source, via, kind, nothing, nothing)

    def carrying(self, rows: Sequence[np.ndarray], inputs: Sequence[int], partials: Sequence[int]) -> Transfers:
        """The same with bytes.

        Args:
            rows: of every use of Q rows, and of KV rows.
            inputs, partials: bytes per row, of Q and of KV.
        """
        into, back = (np.concatenate([r * b for r, b in zip(rows, size, strict=True)]) for size in (inputs, partials))
        return self._replace(inputs=into, partials=back)


def _lookup(uses: Uses, atoms: Atoms) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    return uses.index, atoms.tile_ptr, atoms.tile_atom, len(atoms.begin)


@nb.njit(cache=True)
def _uses_of_units(device, q_index, q_ptr, q_atom, q_atoms, kv_index, kv_ptr, kv_atom, kv_atoms, num_q):
    """(int64[units + 1], int32[...]): which uses every unit has."""
    tiles, groups = device.shape
    ptr = np.zeros(tiles * groups + 1, np.int64)
    use = np.empty((len(q_atom) + len(kv_atom)) * groups, np.int32)
    count = 0
    for t in range(tiles):
        for g in range(groups):
            place = device[t, g] * groups + g
            for p in range(q_ptr[t], q_ptr[t + 1]):
                found = q_index[place * q_atoms + q_atom[p]]
                use[count] = found
                count += found >= 0
            for p in range(kv_ptr[t], kv_ptr[t + 1]):
                found = kv_index[place * kv_atoms + kv_atom[p]]
                use[count] = found + num_q
                count += found >= 0
            ptr[t * groups + g + 1] = count
    return ptr, use[:count].copy()
