"""Structured seeds: placements that are cheap by construction, to start from.

All take a problem and its graph and return (owner of every block, device of every unit).
"""

from __future__ import annotations

import numba as nb
import numpy as np

from hf_dcp.planning.placement.bisect import bisect
from hf_dcp.planning.placement.owners import assign_owners
from hf_dcp.planning.placement.pieces import block_work
from hf_dcp.planning.placement.state import Graph
from hf_dcp.planning.problem import Problem

Seed = tuple[np.ndarray, np.ndarray]

HEAVY_ROWS, HEAVY_TOKENS = 0.5, 4.0
"""Query blocks with more work than this share of a device's mean, and this many times the work of other tokens, run where
their KV lives."""


def contiguous(problem: Problem, graph: Graph) -> Seed:
    """Equal runs of tokens in order; tiles run where their queries live, heavy rows where their KV lives."""
    size, world = problem.blocks.size, problem.world_size
    middle = np.cumsum(size) - (size + 1) // 2
    order = np.argsort(problem.topology.node, kind="stable")
    owner = order[np.minimum(middle * world // size.sum(), world - 1)].astype(np.int32)
    return owner, local_units(problem, owner)


def local_units(problem: Problem, owner: np.ndarray) -> np.ndarray:
    """Tiles at the owner of their queries, or, in heavy rows, of their KV."""
    limits, work = problem.limits, block_work(problem)
    heavy = work > HEAVY_ROWS * limits.total_compute / problem.world_size
    heavy &= work * float(limits.total_tokens) > HEAVY_TOKENS * limits.total_compute * problem.blocks.size.astype(float)
    device = np.where(heavy[problem.tile_q], owner[problem.tile_kv], owner[problem.tile_q])
    return np.repeat(device[:, None], problem.head_groups, 1).astype(np.int32)


def bisected(problem: Problem, graph: Graph, unit_node: np.ndarray, block_node: np.ndarray | None) -> Seed:
    """Every node's tiles cut into rectangles for its devices; owners follow the tiles, inside their node.

    Args:
        unit_node: int32[tiles, groups].
        block_node: int32[blocks], or None: owners are free.
    """
    unit = np.zeros_like(unit_node)
    flat, node_of = unit.reshape(-1), unit_node.reshape(-1)
    for node in range(problem.topology.num_nodes):
        devices = np.flatnonzero(problem.topology.node == node).astype(np.int32)
        units = np.flatnonzero(node_of == node)
        part = bisect(graph, problem.tile_q, problem.tile_kv, problem.head_groups, units, np.ones(len(devices)))
        flat[units] = devices[part]
    free = np.full(len(problem.blocks), -1, np.int32)
    return assign_owners(graph, unit, free, block_node), unit


def dealt(
    problem: Problem, graph: Graph, unit_node: np.ndarray, block_node: np.ndarray, piece: np.ndarray, longest: float
) -> Seed:
    """In every node, short pieces whole and evenly on devices; the tiles of long ones into the compute left.

    Args:
        piece: int64[blocks].
        longest: pieces up to this share of a device's mean tokens are short.
    """
    unit = np.zeros_like(unit_node)
    owner = np.full(len(problem.blocks), -1, np.int32)
    for node in range(problem.topology.num_nodes):
        _deal_node(problem, graph, node, unit_node, block_node, piece, longest, owner, unit)
    return assign_owners(graph, unit, owner, block_node), unit


def _deal_node(problem, graph, node, unit_node, block_node, piece, longest, owner, unit):
    devices = np.flatnonzero(problem.topology.node == node).astype(np.int32)
    groups, size = problem.head_groups, problem.blocks.size
    blocks = np.flatnonzero(block_node == node)
    units = np.flatnonzero(unit_node.reshape(-1) == node)
    tile = units // groups
    mean_tokens = problem.limits.total_tokens / problem.world_size
    mean_work = problem.tile_work[tile].sum() / len(devices)
    tokens_of = np.bincount(piece[blocks], weights=size[blocks], minlength=piece.max() + 1)
    unit_piece = piece[problem.tile_q[tile]]
    work_of = np.bincount(unit_piece, weights=problem.tile_work[tile], minlength=piece.max() + 1)
    is_short = (tokens_of <= longest * mean_tokens) & (work_of <= mean_work)
    tokens, work = np.zeros(len(devices)), np.zeros(len(devices))
    device_of = np.full(len(tokens_of), -1)
    present = np.flatnonzero((tokens_of > 0) | (work_of > 0))
    for p in present[np.argsort(-tokens_of[present], kind="stable")]:
        if is_short[p]:
            d = int(
                np.argmin(np.maximum(tokens + tokens_of[p], (work + work_of[p]) * (mean_tokens / max(mean_work, 1))))
            )
            device_of[p] = d
            tokens[d] += tokens_of[p]
            work[d] += work_of[p]
    chosen = device_of[piece[blocks]]
    owner[blocks[chosen >= 0]] = devices[chosen[chosen >= 0]]
    flat = unit.reshape(-1)
    chosen = device_of[unit_piece]
    flat[units[chosen >= 0]] = devices[chosen[chosen >= 0]]
    _cut_long(problem, graph, units, unit_piece, work_of, device_of, np.maximum(mean_work - work, 0), devices, flat)


def _cut_long(problem, graph, units, unit_piece, work_of, device_of, room, devices, flat):
    """Long pieces, largest first, each on the next devices that have compute left."""
    long = np.flatnonzero((device_of < 0) & (work_of > 0))
    long = long[np.argsort(-work_of[long], kind="stable")]
    total_room = max(room.sum(), 1e-9)
    scale = work_of[long].sum() / total_room
    left = room * scale
    order = np.argsort(-left, kind="stable")
    at = 0
    for p in long:
        need, targets, users = work_of[p], [], []
        while need > 1e-6 * work_of[p] and at < len(order):
            part = min(need, left[order[at]])
            targets.append(part)
            users.append(order[at])
            left[order[at]] -= part
            need -= part
            if left[order[at]] <= 1e-6 * work_of[p]:
                at += 1
        users = users or [int(np.argmax(room))]
        mine = units[unit_piece == p]
        part = bisect(graph, problem.tile_q, problem.tile_kv, problem.head_groups, mine, np.array(targets or [1.0]))
        flat[mine] = devices[np.array(users)[part]]


def laid(problem: Problem, block_node: np.ndarray, piece: np.ndarray, longest: float, by_work: bool) -> Seed:
    """In every node, some pieces whole and evenly, the others end to end into the room left; tiles are local.

    Args:
        piece: int64[blocks].
        longest: pieces up to this share of a device's mean tokens can stay whole.
        by_work: only those do whose tokens bring less work than the average, and devices are filled by tokens and work;
            else by tokens alone, which suits masks under which work is about proportional to tokens.
    """
    owner = np.zeros(len(problem.blocks), np.int32)
    size, work = problem.blocks.size, block_work(problem)
    mean = problem.limits.total_tokens / problem.world_size
    for node in range(problem.topology.num_nodes):
        devices = np.flatnonzero(problem.topology.node == node).astype(np.int32)
        blocks = np.flatnonzero(block_node == node)
        if len(blocks):
            local = piece[blocks] - piece[blocks].min()
            measure = work[blocks] if by_work else size[blocks]
            owner[blocks] = devices[_lay(local, size[blocks], measure, len(devices), longest * mean)]
    return owner, local_units(problem, owner)


@nb.njit(cache=True)
def _lay(piece, size, work, devices, longest):
    """int64[blocks]: the device of each block of one node."""
    pieces = piece.max() + 1
    tokens_of, work_of = np.zeros(pieces), np.zeros(pieces)
    for i in range(len(piece)):
        tokens_of[piece[i]] += size[i]
        work_of[piece[i]] += work[i]
    mean_tokens, mean_work = size.sum() / devices, max(work.sum() / devices, 1.0)
    light = np.zeros(pieces, np.bool_)
    heavy_tokens, heavy_work = 0.0, 0.0
    for p in range(pieces):
        light[p] = tokens_of[p] <= longest and work_of[p] * mean_tokens <= mean_work * tokens_of[p]
        if not light[p]:
            heavy_tokens += tokens_of[p]
            heavy_work += work_of[p]
    # What light pieces lack in work, heavy ones of this density have to bring: equal lack on all devices lets them do it.
    density = heavy_work / heavy_tokens if heavy_tokens > 0 else mean_work / mean_tokens
    lack = density * tokens_of - work_of
    if np.abs(lack).max() <= 1e-9 * mean_work:  # work is tokens: the room that a piece takes is all that counts
        lack = tokens_of
    tokens, load, lacking, result = (
        np.zeros(devices),
        np.zeros(devices),
        np.zeros(devices),
        np.zeros(len(piece), np.int64),
    )
    for p in np.argsort(-lack, kind="mergesort"):
        if not light[p]:
            continue
        device, least = 0, np.inf
        for d in range(devices):
            over = max(0.0, (tokens[d] + tokens_of[p]) / mean_tokens - 1.0)
            full = lacking[d] / (density * mean_tokens) + 10.0 * over
            if full < least:
                device, least = d, full
        tokens[device] += tokens_of[p]
        load[device] += work_of[p]
        lacking[device] += lack[p]
        result[piece == p] = device
    at = 0
    for long in np.argsort(-tokens_of, kind="mergesort"):
        if light[long]:
            continue
        for i in np.flatnonzero(piece == long):  # type: ignore[assignment]
            while at < devices - 1 and (
                (tokens[at] + size[i] / 2) / mean_tokens + (load[at] + work[i] / 2) / mean_work > 2.0
            ):
                at += 1
            tokens[at] += size[i]
            load[at] += work[i]
            result[i] = at
    return result
