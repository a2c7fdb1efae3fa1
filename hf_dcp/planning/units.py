"""Units: tiles of one head group each, and the orders in which a device can compute them."""

from __future__ import annotations

from typing import NamedTuple

import numba as nb
import numpy as np

from hf_dcp.planning.transfers import Transfers


class Units(NamedTuple):
    """Tiles of one head group each (``tile * groups + group``), and what their order on a device depends on."""

    seconds: np.ndarray
    """float64[units]: of arithmetic."""
    rows: np.ndarray
    """int64[units]: query rows."""
    block: np.ndarray
    """int64[units]: Q block and head group."""
    begin: np.ndarray
    """int64[world_size + 1]: where each device's units begin in the two orders."""
    front: np.ndarray
    """int64[units]: as they are computed, by device."""
    back: np.ndarray
    """int64[units]: in which they are kept for the last division, by device."""
    kind: np.ndarray
    """int8[units]: where rows come from: 0 local, 1 the own node, 2 other nodes, 3 a gateway."""
    mean: float
    """Seconds that a device computes on average."""


def make_units(
    tile_device: np.ndarray,
    seconds: np.ndarray,
    rows: np.ndarray,
    transfers: Transfers,
    blocks: tuple[np.ndarray, np.ndarray],
    world: int,
) -> Units:
    """
    Args:
        tile_device: int32[tiles, groups].
        seconds: float64[tiles], of each head group.
        rows: int64[tiles], query rows.
        blocks: int32[tiles] each, the Q and the KV block of every tile.
    """
    device, groups = tile_device.ravel().astype(np.int64), tile_device.shape[1]
    kinds, returns = _kinds(transfers)
    # units that read the same remote rows, of the side whose rows come from farther away, are computed together
    by_q = (kinds[0] > kinds[1]) | ((kinds[0] == kinds[1]) & _receives_more_q(transfers, world)[device])
    kind = kinds.max(0)
    q, kv = (np.repeat(block, groups).astype(np.int64) for block in blocks)
    most = int(max(q.max(initial=0), kv.max(initial=0))) + 1
    group = np.tile(np.arange(groups), len(seconds))
    number = np.where(by_q, q, most + kv) * groups + group
    span = 2 * most * groups
    front = np.argsort(((device * 4 + kind) * 4 + 3 - returns) * span + number, kind="stable")
    back = np.argsort(((device * 4 + returns) * 4 + 3 - kind) * span + number, kind="stable")
    begin = np.searchsorted(device[front], np.arange(world + 1))
    of_unit = np.repeat(seconds, groups)
    mean = float(of_unit.sum() / world)
    return Units(of_unit, np.repeat(rows, groups), q * groups + group, begin, front, back, kind, mean)


def _receives_more_q(transfers: Transfers, world: int) -> np.ndarray:
    """Whether a device has more bytes of Q rows than of KV rows: bool[world_size]."""
    size = transfers.inputs + transfers.partials
    q, kv = (
        np.bincount(transfers.device[part], weights=size[part], minlength=world)
        for part in (slice(transfers.num_q), slice(transfers.num_q, None))
    )
    return q > kv


@nb.njit(cache=True)
def _kinds(transfers):
    """(Where the Q and the KV rows of every unit come from: int8[2, units], where its results go: int8[units])."""
    units = len(transfers.unit_ptr) - 1
    kinds, returns = np.zeros((2, units), np.int8), np.zeros(units, np.int8)
    for unit in range(units):
        for p in range(transfers.unit_ptr[unit], transfers.unit_ptr[unit + 1]):
            use = transfers.unit_use[p]
            side = int(use >= transfers.num_q)
            kinds[side, unit] = max(kinds[side, unit], transfers.kind[use])
            if transfers.partials[use] > 0:
                returns[unit] = max(returns[unit], transfers.kind[use])
    return kinds, returns
