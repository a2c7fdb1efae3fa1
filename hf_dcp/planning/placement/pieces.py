"""Pieces: runs of blocks of one sequence that belong together, dealt to nodes and devices whole where they fit."""

from __future__ import annotations

import numba as nb
import numpy as np

from hf_dcp.planning.placement.moves import random_below
from hf_dcp.planning.problem import Problem

MOST_SEGMENTS = 64
"""A sequence with more segments than this is one piece."""
PACKINGS, PACKING_TRIES, SHAKEN = 24, 1000, 6
"""So many packings are tried, each with so many moves and swaps of whole pieces between bins, after so many were put
anywhere."""


def block_work(problem: Problem) -> np.ndarray:
    """int64[blocks]: work of all tiles of the block's queries, all head groups."""
    work = np.bincount(problem.tile_q, weights=problem.tile_work, minlength=len(problem.blocks))
    return work.astype(np.int64) * problem.head_groups


def sequence_pieces(problem: Problem) -> np.ndarray:
    """int64[blocks]: every sequence is a piece."""
    return problem.blocks.sequence.astype(np.int64)


def segment_pieces(problem: Problem) -> np.ndarray:
    """int64[blocks]: where masks have segments (answers, documents), every segment is a piece."""
    blocks, piece = problem.blocks, np.zeros(len(problem.blocks), np.int64)
    for s, ranges in enumerate(problem.tiles[0].ranges):
        first, last = np.searchsorted(blocks.sequence, [s, s + 1])
        cuts = segment_cuts(ranges)
        middle = blocks.start[first:last] - problem.batch.starts[s] + blocks.size[first:last] // 2
        piece[first:last] = np.searchsorted(cuts, middle, side="right")
    return np.cumsum(np.append(0, (np.diff(piece) != 0) | (np.diff(blocks.sequence) != 0)))


def segment_cuts(ranges: np.ndarray) -> np.ndarray:
    """Tokens at which a segment begins: rows that attend to nothing of the row before, and ends of shared prefixes.

    Args:
        ranges: int32[length, R, 2], normalised.
    """
    begins, prefixes = _segment_begins(np.ascontiguousarray(ranges), MOST_SEGMENTS)
    return np.unique(np.concatenate([begins, prefixes[(prefixes > 0) & (prefixes < len(ranges))]]))


@nb.njit(cache=True)
def _segment_begins(ranges, most):
    """(First rows of segments, what they attend to besides themselves: [0, prefix)); none if there are too many."""
    begins, prefixes = np.empty(most, np.int64), np.empty(most, np.int64)
    found, shared, before_lo, before_hi = 0, 0, -1, -1
    for i in range(len(ranges)):
        last = 0
        while last + 1 < ranges.shape[1] and ranges[i, last + 1, 0] < ranges[i, last + 1, 1]:
            last += 1
        lo, hi = ranges[i, last, 0], ranges[i, last, 1]
        if i > 0 and lo == i and before_lo != lo and before_hi == i:
            if found == most:
                return begins[:0], prefixes[:0]
            begins[found] = i
            found += 1
            if last > 0:
                prefixes[shared] = ranges[i, 0, 1]
                shared += 1
        before_lo, before_hi = lo, hi
    return begins[:found], prefixes[:shared]


def pack_pieces(
    piece: np.ndarray, tokens: np.ndarray, work: np.ndarray, room: np.ndarray, slack: tuple[float, float], seed: int
) -> np.ndarray:
    """Deal whole pieces to bins, so that little work and few tokens are above what bins may have; cut the rest off.

    Args:
        piece: int64[blocks], ascending.
        tokens, work: int64[blocks].
        room: float64[bins], the share of all tokens and all work that a bin should have.
        slack: how far above its share of (tokens, work) a bin may get.
        seed: of the local search.

    Returns:
        int32[blocks]: the bin of each.
    """
    share = np.stack([tokens / max(tokens.sum(), 1), work / max(work.sum(), 1)], 1)
    begin = np.flatnonzero(np.append(True, np.diff(piece) != 0))
    of_piece = np.add.reduceat(share, begin)
    order = np.argsort(-of_piece.max(1), kind="stable")
    limit = room[:, None] * (1 + np.array(slack))
    tries = PACKING_TRIES if len(room) > 1 and len(begin) > 1 else 0
    whole = _pack_whole(of_piece, order, limit, PACKINGS, tries, np.uint64(2 * seed + 1))
    result = np.repeat(whole, np.diff(np.append(begin, len(piece))))
    _cut_off(share, np.append(begin, len(piece)), result, limit)
    return result


@nb.njit(cache=True)
def _over(load, limit, b):
    """How far a bin is above its limits, tokens and work in shares; work counts less: tiles can go elsewhere alone."""
    return 2.0 * max(0.0, load[b, 0] - limit[b, 0]) + max(0.0, load[b, 1] - limit[b, 1])


@nb.njit(cache=True)
def _pack_whole(share, order, limit, restarts, tries, seed):
    """The best of several packings: int32[pieces]. The first begins largest first, the others from the best so far, shaken."""
    rng = np.array([seed * np.uint64(0x9E3779B97F4A7C15)], np.uint64)
    home = _largest_first(share, order, limit)
    best, least = home.copy(), np.inf
    for restart in range(restarts + 1):
        if restart > 0:
            home = best.copy()
            for _ in range(SHAKEN):
                home[random_below(rng, len(share))] = random_below(rng, len(limit))
        over = _improve_packing(share, limit, home, tries, rng)
        if over < least:
            best, least = home.copy(), over
        if least == 0.0:
            break
    return best


@nb.njit(cache=True)
def _largest_first(share, order, limit):
    load, home = np.zeros(limit.shape), np.zeros(len(share), np.int32)
    for p in order:
        best, best_full = 0, np.inf
        for b in range(len(limit)):
            full = max((load[b, 0] + share[p, 0]) / limit[b, 0], (load[b, 1] + share[p, 1]) / limit[b, 1])
            if full < best_full:
                best, best_full = b, full
        home[p] = best
        load[best] += share[p]
    return home


@nb.njit(cache=True)
def _improve_packing(share, limit, home, tries, rng):
    """Random moves and swaps that don't make it worse; returns how far all bins are above their limits."""
    load = np.zeros(limit.shape)
    for p in range(len(share)):
        load[home[p]] += share[p]
    for _ in range(tries):
        p, q = random_below(rng, len(share)), random_below(rng, len(share))
        a, b = home[p], home[q]
        swap = random_below(rng, 2) == 0
        if a == b:
            continue
        before = _over(load, limit, a) + _over(load, limit, b)
        if before == 0.0:
            continue
        change = share[p] - share[q] if swap else share[p].copy()
        load[a] -= change
        load[b] += change
        if _over(load, limit, a) + _over(load, limit, b) <= before:
            home[p] = b
            if swap:
                home[q] = a
        else:
            load[a] += change
            load[b] -= change
    over = 0.0
    for b in range(len(limit)):
        over += _over(load, limit, b)
    return over


@nb.njit(cache=True)
def _cut_off(share, begin, result, limit):
    """Move the last blocks of the largest pieces of bins that are too full to the bin with most room."""
    bins, load = len(limit), np.zeros(limit.shape)
    for block in range(len(share)):
        load[result[block]] += share[block]
    for _ in range(len(share)):
        full, target, most, least = -1, 0, 1.0 + 1e-9, np.inf
        for b in range(bins):
            filled = max(load[b, 0] / limit[b, 0], load[b, 1] / limit[b, 1])
            if filled > most:
                full, most = b, filled
            if filled < least:
                target, least = b, filled
        if full < 0:
            return
        largest, chosen = 0.0, -1
        for piece in range(len(begin) - 1):
            size, last = 0.0, -1
            for block in range(begin[piece], begin[piece + 1]):
                if result[block] == full:
                    size += share[block, 1] + share[block, 0]
                    last = block
            if size > largest:
                largest, chosen = size, last
        filled = max(
            (load[target, 0] + share[chosen, 0]) / limit[target, 0],
            (load[target, 1] + share[chosen, 1]) / limit[target, 1],
        )
        if filled >= most:
            return
        load[full] -= share[chosen]
        load[target] += share[chosen]
        result[chosen] = target
