"""Rows of one long sequence on nodes: nested bands, so that even late rows need little from other nodes.

A node that holds rows up to token t needs the KV of all rows before t, more or less. So the nodes take turns at the upper
end, and even out their work at the lower one: the last node has a band of rows in the middle, the one before it a band
below and a band above that, and so on. Late nodes get more work than the first, as far as limits permit: that
brings the upper ends down.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from hf_dcp.planning.placement.pieces import block_work
from hf_dcp.planning.problem import Problem


def nested_bands(problem: Problem, deficit: float) -> np.ndarray:
    """
    Args:
        deficit: how much less work than its share the innermost node gets, relative to that; the others share it.

    Returns:
        int32[blocks]: the node of each block.
    """
    room = np.bincount(problem.topology.node) / problem.world_size
    work, tokens = block_work(problem), problem.blocks.size
    work_goal = room * work.sum() * (1 + deficit / max(1, len(room) - 1))
    work_goal[-1] = max(0.0, work.sum() - work_goal[:-1].sum())
    token_goal = room * tokens.sum()
    return _bands(tokens.astype(np.float64), work.astype(np.float64), token_goal, work_goal)


@nb.njit(cache=True)
def _bands(tokens, work, token_goal, work_goal):
    blocks, nodes = len(tokens), len(token_goal)
    result = np.zeros(blocks, np.int32)
    tokens_before, work_before = np.zeros(blocks + 1), np.zeros(blocks + 1)
    tokens_before[1:], work_before[1:] = np.cumsum(tokens), np.cumsum(work)
    low, high = -1, -1
    for node in range(nodes - 1, 0, -1):
        best, best_low, best_high = np.inf, 0, 0
        if low < 0:
            for first in range(blocks):
                last = (
                    np.searchsorted(tokens_before, tokens_before[first] + token_goal[node] * (1 + 1e-9), side="right")
                    - 1
                )
                off = abs(work_before[last] - work_before[first] - work_goal[node])
                if off < best:
                    best, best_low, best_high = off, first, last
        else:
            for first in range(low + 1):
                rest = token_goal[node] - (tokens_before[low] - tokens_before[first])
                if rest < -1e-9 * token_goal[node]:
                    continue
                last = (
                    np.searchsorted(tokens_before, tokens_before[high] + rest + 1e-9 * token_goal[node], side="right")
                    - 1
                )
                done = work_before[low] - work_before[first] + work_before[last] - work_before[high]
                if abs(done - work_goal[node]) < best:
                    best, best_low, best_high = abs(done - work_goal[node]), first, last
        if low < 0:
            result[best_low:best_high] = node
        else:
            result[best_low:low] = node
            result[high:best_high] = node
        low, high = best_low, best_high
    return result
