"""Recursive bisection: tiles cut into parts of given work, along query blocks, KV blocks or head groups.

Every cut is tried along each axis, all the way down for few parts; the cheapest tree of cuts is kept. A part costs the
rows that it touches. Attention's tiles lie in a plane (times head groups), so that parts come out as near-rectangles.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from hf_dcp.planning.placement.state import Graph

SNAP = 0.03
"""A cut moves to the nearest border between blocks if that shifts at most this share of the work."""
EXHAUSTIVE_PARTS = 8
"""Up to this many parts all axes are followed to the end; above, the axis is chosen by the rows that both halves touch."""


def bisect(
    graph: Graph, tile_q: np.ndarray, tile_kv: np.ndarray, groups: int, units: np.ndarray, target: np.ndarray
) -> np.ndarray:
    """
    Args:
        units: int64[units], ``tile * groups + group``.
        target: float64[parts], the share of the work that every part should have; zeros are legal.

    Returns:
        int32[units]: the part of each.
    """
    if len(units) == 0 or len(target) == 1:
        return np.zeros(len(units), np.int32)
    seen = np.zeros(len(graph.atom_block) * groups, np.int64)
    _, part = _bisect(graph, tile_q, tile_kv, groups, units, target.astype(np.float64), seen, np.zeros(1, np.int64))
    return part


@nb.njit(cache=True)
def _rows_cost(graph, groups, units, seen, stamp):
    """Cost of all rows that the units touch."""
    stamp[0] += 1
    total = 0.0
    for unit in units:
        tile, g = unit // groups, unit % groups
        for p in range(graph.tile_ptr[tile], graph.tile_ptr[tile + 1]):
            atom = graph.tile_atom[p]
            if seen[atom * groups + g] != stamp[0]:
                seen[atom * groups + g] = stamp[0]
                total += graph.device_cost[atom]
    return total


@nb.njit(cache=True)
def _key(tile_q, tile_kv, groups, unit, axis):
    if axis == 0:
        return unit % groups
    return tile_q[unit // groups] if axis == 1 else tile_kv[unit // groups]


@nb.njit(cache=True)
def _sorted_along(tile_q, tile_kv, groups, units, axis):
    """Positions of the units in the order of one axis (a stable counting sort), and the ascending keys."""
    key = np.empty(len(units), np.int64)
    for i in range(len(units)):
        key[i] = _key(tile_q, tile_kv, groups, units[i], axis)
    lowest = key.min()
    begin = np.zeros(key.max() - lowest + 2, np.int64)
    for k in key:
        begin[k - lowest + 1] += 1
    begin = np.cumsum(begin)
    order, ordered = np.empty(len(units), np.int64), np.empty(len(units), np.int64)
    for i in range(len(units)):
        at = begin[key[i] - lowest]
        order[at], ordered[at] = i, key[i]
        begin[key[i] - lowest] += 1
    return order, ordered


@nb.njit(cache=True)
def _cut(graph, groups, units, order, key, goal, slack):
    """How many units, in this order, make ``goal`` of work; a border between keys if one is near."""
    count, done = 0, 0
    while count < len(order) and done + graph.tile_work[units[order[count]] // groups] / 2 <= goal:
        done += graph.tile_work[units[order[count]] // groups]
        count += 1
    best, best_off = count, slack
    before, work = count, done
    while before > 0 and (before == len(order) or key[before] == key[before - 1]):
        before -= 1
        work -= graph.tile_work[units[order[before]] // groups]
    if before > 0 and abs(work - goal) <= best_off:
        best, best_off = before, abs(work - goal)
    after, work = count, done
    while 0 < after < len(order) and key[after] == key[after - 1]:
        work += graph.tile_work[units[order[after]] // groups]
        after += 1
    if after < len(order) and abs(work - goal) < best_off:
        best = after
    return best


@nb.njit(cache=True)
def _bisect(graph, tile_q, tile_kv, groups, units, target, seen, stamp):
    """(cost, part of each unit) of the best tree of cuts."""
    parts = len(target)
    result = np.zeros(len(units), np.int32)
    if parts == 1 or len(units) == 0:
        return _rows_cost(graph, groups, units, seen, stamp), result
    half = parts // 2
    share = target[:half].sum() / max(target.sum(), 1e-300)
    total = 0
    for unit in units:
        total += graph.tile_work[unit // groups]
    slack = SNAP * total
    best, best_axis = np.inf, -1
    if parts > EXHAUSTIVE_PARTS:  # look one cut ahead only
        for axis in range(3):
            order, key = _sorted_along(tile_q, tile_kv, groups, units, axis)
            if key[0] == key[-1]:
                continue
            count = _cut(graph, groups, units, order, key, share * total, slack)
            cost = _rows_cost(graph, groups, units[order[:count]], seen, stamp)
            cost += _rows_cost(graph, groups, units[order[count:]], seen, stamp)
            if cost < best:
                best, best_axis = cost, axis
        best = np.inf
    for axis in range(3):
        if best_axis >= 0 and parts > EXHAUSTIVE_PARTS and axis != best_axis:
            continue
        order, key = _sorted_along(tile_q, tile_kv, groups, units, axis)
        if key[0] == key[-1] and axis < 2:
            continue  # the last axis is always taken, so that there is a result
        count = _cut(graph, groups, units, order, key, share * total, slack)
        first, second = order[:count], order[count:]
        cost, part = _bisect(graph, tile_q, tile_kv, groups, units[first], target[:half], seen, stamp)
        if cost >= best:
            continue
        other_cost, other = _bisect(graph, tile_q, tile_kv, groups, units[second], target[half:], seen, stamp)
        if cost + other_cost < best:
            best = cost + other_cost
            result[first] = part
            result[second] = other + half
    return best, result
