"""Bytes of a placement by the words of the byte rules, row by row over the dense mask: independent of the planner."""

from __future__ import annotations

import numpy as np

from hf_dcp.config import DTYPE_BYTES
from hf_dcp.planning import Plan
from tests.planning.strategies import dense_mask

PASSES = ("forward", "backward", "backward_keep")


def row_bytes(plan: Plan, which: str) -> tuple[int, int]:
    """Bytes that a Q row and a KV row of one head group cost in total, there and back."""
    shape, groups = plan.shape, plan.head_groups
    heads, kv_heads = shape.heads // groups, shape.kv_heads // groups
    d, e = shape.head_dim, DTYPE_BYTES[shape.dtype]
    r = DTYPE_BYTES[plan.config.reduce_dtype or shape.dtype]
    q = dout = heads * d * e
    out = dq = heads * d * r
    kv, dkv = 2 * kv_heads * d * e, 2 * kv_heads * d * r
    lse = delta = 4 * heads
    return {
        "forward": (q + out + lse, kv),
        "backward": (q + dout + lse + delta + dq, kv + dkv),
        "backward_keep": (dout + lse + delta + dq, dkv),
    }[which]


def transfers(plan: Plan, window: int | None) -> np.ndarray:
    """int[2, 2]: rows moved (between nodes, inside) of Q and of KV: one less than nodes, and devices, that use a row."""
    index = [w for w, _ in plan.shape.windows].index(window)
    tiles, device = plan.tiles[index], plan.placement.tile_device[index]
    mask, blocks, node = dense_mask(plan.batch, window), plan.blocks, plan.topology.node_of_rank
    moved = np.zeros((2, 2), int)
    for group in range(plan.head_groups):
        users: tuple[dict, dict] = ({}, {})
        for q, kv, on in zip(tiles.q, tiles.kv, device[:, group], strict=True):
            first, size = blocks.start[[q, kv]], blocks.size[[q, kv]]
            part = mask[first[0] : first[0] + size[0], first[1] : first[1] + size[1]]
            for side, block in enumerate((q, kv)):
                for row in np.flatnonzero(part.any(1 - side)) + first[side]:
                    owner = int(plan.placement.block_device[block])
                    users[side].setdefault(int(row), {owner}).add(int(on))
        for side in (0, 1):
            for ranks in users[side].values():
                between = len({node[r] for r in ranks}) - 1
                moved[side] += [between, len(ranks) - 1 - between]
    return moved


def expected_bytes(plan: Plan, window: int | None, which: str) -> list[int]:
    """[between nodes, inside nodes] in one layer with this window."""
    return (np.array(row_bytes(plan, which)) @ transfers(plan, window)).tolist()
