"""Contiguous chunks of uneven length: the seeds that suit windows, under which every chunk needs a few rows before it."""

from __future__ import annotations

import numba as nb
import numpy as np

from hf_dcp.planning.problem import KV_SIDE, Problem

POINTS = 2048
"""Chunks of several sequences begin at about so many points, and at sequences."""
HEAVY_ROWS = 4.0
"""Rows count with at most this many times the mean work: heavier ones are computed where their KV lives."""
INSIDE = 0.997
"""Share of the limits that chunks may use."""


def longest_chunks(problem: Problem) -> np.ndarray:
    """First tokens of chunks of a single sequence that are as long as limits permit, from its end on; none if that is
    too short for it. The fewer chunks there are, the fewer need rows before them.
    """
    limits, before = problem.limits, np.concatenate([[0], np.cumsum(_row_work(problem))])
    starts = [problem.batch.num_tokens]
    while starts[-1] > 0 and len(starts) <= problem.world_size:
        end = starts[-1]
        least = int(np.searchsorted(before, before[end] - limits.compute))
        starts.append(min(max(end - limits.tokens, least, 0), end - 1))
    return np.array(starts[:0:-1], np.int64) if starts[-1] == 0 else np.zeros(0, np.int64)


def cheapest_chunks(problem: Problem) -> tuple[np.ndarray, np.ndarray, float] | None:
    """Sequences laid end to end, the longest first, and cut where that takes the fewest rows from chunk to chunk.

    Returns:
        first batch-global token of every chunk, or part of a chunk that is in another sequence, the device of each, and
        what the rows that the first row of every chunk reads cost: about what the chunks cost. None if no cut of this kind
        keeps the limits.
    """
    batch, limits, topology = problem.batch, problem.limits, problem.topology
    step = max(1, batch.num_tokens // POINTS)
    order = np.argsort(-np.array(batch.lengths), kind="stable")
    points, token = [], []
    laid = 0
    for s in order:
        within = np.arange(0, batch.lengths[s], step)
        points.append(laid + within)
        token.append(batch.starts[s] + within)
        laid += batch.lengths[s]
    at, token_at = np.append(np.concatenate(points), laid), np.concatenate(token)
    work = _row_work(problem)
    capped = np.minimum(work, int(HEAVY_ROWS * work.mean()) + 1)
    rows = np.concatenate([capped[batch.starts[s] : batch.starts[s + 1]] for s in order])
    work_at = np.concatenate([[0], np.cumsum(rows)])[at]
    kv = problem.atom_side == KV_SIDE
    row_cost = float(problem.atom_weight[kv].sum()) * problem.head_groups / max(1, problem.atom_rows[kv].sum())
    layers = sum(count for _, count in problem.shape.windows)
    need = work[token_at] / (problem.shape.heads * layers) * row_cost
    need[np.isin(token_at, batch.starts)] = 0.0
    device = np.argsort(topology.node, kind="stable").astype(np.int32)
    node = topology.node[device]
    price = np.where(np.append(False, node[1:] != node[:-1]), topology.inter_cost, topology.intra_cost).astype(float)
    cost, first = _cheapest(at, work_at, need, price, INSIDE * limits.tokens, INSIDE * limits.compute)
    if not np.isfinite(cost):
        return None
    chunk = np.searchsorted(first, np.arange(len(token_at)), side="right") - 1
    begins = np.flatnonzero(np.append(True, np.diff(chunk) != 0) | np.isin(token_at, batch.starts))
    return token_at[begins], device[chunk[begins]], cost


def _row_work(problem: Problem) -> np.ndarray:
    """int64[tokens]: work of every row, all heads and layers."""
    work = np.zeros(problem.batch.num_tokens, np.int64)
    for tiles, (_, layers) in zip(problem.tiles, problem.shape.windows, strict=True):
        for s, ranges in enumerate(tiles.ranges):
            area = (ranges[:, :, 1] - ranges[:, :, 0]).sum(1, dtype=np.int64)
            work[problem.batch.starts[s] : problem.batch.starts[s + 1]] += area * (layers * problem.shape.heads)
    return work


@nb.njit(cache=True)
def _cheapest(at, work_at, need, price, most_tokens, most_work):
    """(cost, int64[chunks]: the point at which each chunk begins, ascending) of the cheapest cut into len(price) chunks.

    A chunk that begins at point j costs need[j] times its price; chunks may be empty.
    """
    points, chunks = len(at) - 1, len(price)
    best = np.full((chunks + 1, points + 1), np.inf)
    came = np.zeros((chunks + 1, points + 1), np.int64)
    best[0, 0] = 0.0
    for k in range(1, chunks + 1):
        least = 0
        for i in range(points + 1):
            best[k, i], came[k, i] = best[k - 1, i], i  # an empty chunk
            while at[i] - at[least] > most_tokens or work_at[i] - work_at[least] > most_work:
                least += 1
            for j in range(least, i):
                cost = best[k - 1, j] + need[j] * price[k - 1]
                if cost < best[k, i]:
                    best[k, i], came[k, i] = cost, j
    first = np.empty(chunks, np.int64)
    i = points
    for k in range(chunks, 0, -1):
        i = came[k, i]
        first[k - 1] = i
    return best[chunks, points], first
