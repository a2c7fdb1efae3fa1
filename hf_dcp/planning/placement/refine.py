"""Refinement: annealing by counted moves, with the moves that matter for rows shared by tiles.

Moves: one tile; all tiles of a net on a device, or those up to or from one of them; the tiles of two nets against each
other; a block's ownership, alone or against another block's, with or without the tiles of its queries. Random numbers,
thresholds and schedule use only integer and basic floating-point arithmetic, so that results are equal on all machines.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from hf_dcp.planning.placement.state import Graph, State, move_block, move_unit

# Annealing accepts a worse move of cost d at temperature T if d <= T * -log(u), u uniform: a table of 1024 quantiles.
_QUANTILES = np.round(-np.log((np.arange(1024) + 0.5) / 1024) * 4096) / 4096

UNIT_MOVES, SWAP_MOVES = 700, 150
"""Per thousand: moves of tiles, and swaps of tiles; the rest moves blocks."""


def refine(graph: Graph, state: State, effort: int, seed: int, temperature: float = 0.0) -> None:
    """Improve a placement in place.

    Args:
        effort: how many tiles are moved, proposals that are taken back included.
        seed: of the random choices.
        temperature: as a share of the mean cost of a net; 0: only accept what is not worse.
    """
    if effort <= 0 or len(graph.node) == 1 or len(graph.tile_work) == 0:
        return
    mean = float(graph.device_cost.mean())
    _anneal(graph, state, effort, np.uint64(seed * 2 + 1), temperature * mean, _QUANTILES)


@nb.njit(cache=True, inline="always")
def _random(rng, below):
    """A number in [0, below): xorshift64*."""
    x = rng[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    rng[0] = x
    high = (x * np.uint64(2685821657736338717)) >> np.uint64(33)
    return np.int64((high * np.uint64(below)) >> np.uint64(31))


@nb.njit(cache=True)
def _any_unit_of(graph, state, rng, atom, g):
    first = graph.atom_ptr[atom]
    return graph.atom_tile[first + _random(rng, graph.atom_ptr[atom + 1] - first)]


@nb.njit(cache=True)
def _any_atom_of(graph, rng, tile):
    first = graph.tile_ptr[tile]
    return graph.tile_atom[first + _random(rng, graph.tile_ptr[tile + 1] - first)]


@nb.njit(cache=True)
def _target(graph, state, rng, tile, g):
    """A device that already uses one of the tile's nets; now and then any device."""
    atom = _any_atom_of(graph, rng, tile)
    dice = _random(rng, 100)
    if dice < 30:
        return state.owner[graph.atom_block[atom]]
    if dice < 97:
        return state.unit[_any_unit_of(graph, state, rng, atom, g), g]
    return np.int32(_random(rng, len(graph.node)))


@nb.njit(cache=True)
def _collect(graph, state, atom, g, device, since, until, moved, count):
    """Append the tiles of a net on a device, from tile ``since`` to ``until``, to the moved ones."""
    for p in range(graph.atom_ptr[atom], graph.atom_ptr[atom + 1]):
        tile = graph.atom_tile[p]
        if since <= tile <= until and state.unit[tile, g] == device:
            moved[count, 0], moved[count, 1], moved[count, 2] = tile, g, device
            count += 1
    return count


@nb.njit(cache=True)
def _propose_units(graph, state, rng, moved):
    """Some tiles of one net go from a device to another; returns (delta, tiles moved)."""
    groups = state.unit.shape[1]
    tile, g = _random(rng, len(graph.tile_work)), _random(rng, groups)
    source, target = state.unit[tile, g], _target(graph, state, rng, tile, g)
    if source == target:
        return 0.0, 0
    kind = _random(rng, 8)
    if kind < 4:
        moved[0, 0], moved[0, 1], moved[0, 2] = tile, g, source
        return move_unit(graph, state, tile, g, target), 1
    since = tile if kind == 6 else 0
    until = tile if kind == 7 else len(graph.tile_work)
    count = _collect(graph, state, _any_atom_of(graph, rng, tile), g, source, since, until, moved, 0)
    delta = 0.0
    for i in range(count):
        delta += move_unit(graph, state, moved[i, 0], g, target)
    return delta, count


@nb.njit(cache=True)
def _propose_swap(graph, state, rng, moved):
    """The tiles of a net on one device against those of another net on another device."""
    groups = state.unit.shape[1]
    tile, g = _random(rng, len(graph.tile_work)), _random(rng, groups)
    other = _any_unit_of(graph, state, rng, _any_atom_of(graph, rng, tile), g)
    source, target = state.unit[tile, g], state.unit[other, g]
    if source == target:
        return 0.0, 0
    last = len(graph.tile_work)
    first = _collect(graph, state, _any_atom_of(graph, rng, tile), g, source, 0, last, moved, 0)
    count = _collect(graph, state, _any_atom_of(graph, rng, other), g, target, 0, last, moved, first)
    delta = 0.0
    for i in range(count):
        delta += move_unit(graph, state, moved[i, 0], g, target if i < first else source)
    return delta, count


@nb.njit(cache=True)
def _carry(graph, state, block, source, target, moved, count):
    """Move the tiles of a block's queries that are on ``source``."""
    delta = 0.0
    for p in range(graph.row_ptr[block], graph.row_ptr[block + 1]):
        tile = graph.row_tile[p]
        for g in range(state.unit.shape[1]):
            if state.unit[tile, g] == source:
                moved[count, 0], moved[count, 1], moved[count, 2] = tile, g, source
                count += 1
                delta += move_unit(graph, state, tile, g, target)
    return delta, count


@nb.njit(cache=True)
def _propose_block(graph, state, rng, moved, moved_block):
    """A block changes its owner, against another block where the target has no room; returns (delta, tiles, blocks)."""
    block = _random(rng, len(state.owner))
    source, target = state.owner[block], np.int32(_random(rng, len(graph.node)))
    first, last = graph.block_ptr[block], graph.block_ptr[block + 1]
    if last > first and _random(rng, 10) < 8:
        atom = graph.block_atom[first + _random(rng, last - first)]
        target = state.unit[_any_unit_of(graph, state, rng, atom, 0), _random(rng, state.unit.shape[1])]
    if source == target:
        return 0.0, 0, 0
    blocks = 1
    moved_block[0, 0], moved_block[0, 1] = block, source
    if state.tokens[target] + graph.block_size[block] > graph.token_limit:
        for _ in range(4 * len(graph.node)):
            other = _random(rng, len(state.owner))
            if state.owner[other] == target:
                moved_block[1, 0], moved_block[1, 1] = other, target
                blocks = 2
                break
        if blocks == 1:
            return 0.0, 0, 0
    delta = move_block(graph, state, block, target)
    if blocks == 2:
        delta += move_block(graph, state, moved_block[1, 0], source)
    count = 0
    if _random(rng, 2) == 0:
        change, count = _carry(graph, state, block, source, target, moved, 0)
        delta += change
        if blocks == 2:  # tiles that just came along are the first block's, and stay
            change, count = _carry(graph, state, moved_block[1, 0], target, source, moved, count)
            delta += change
    return delta, count, blocks


@nb.njit(cache=True)
def _anneal(graph, state, effort, seed, temperature, quantiles):
    rng = np.array([seed * np.uint64(0x9E3779B97F4A7C15)], np.uint64)
    groups = state.unit.shape[1]
    moved = np.empty((2 * len(graph.tile_work) * groups + 2, 3), np.int32)
    moved_block = np.empty((2, 2), np.int32)
    now = temperature
    spent, next_cooling = 0, 0
    while spent < effort:
        if spent >= next_cooling:
            left = (effort - spent) / effort
            now = temperature * left * left
            next_cooling += effort // 256 + 1
        dice = _random(rng, 1000)
        blocks = 0
        if dice < UNIT_MOVES:
            delta, count = _propose_units(graph, state, rng, moved)
        elif dice < UNIT_MOVES + SWAP_MOVES:
            delta, count = _propose_swap(graph, state, rng, moved)
        else:
            delta, count, blocks = _propose_block(graph, state, rng, moved, moved_block)
        spent += 1 + count
        if delta <= 0.0 or (now > 0.0 and delta <= now * quantiles[_random(rng, len(quantiles))]):
            continue
        for i in range(count - 1, -1, -1):
            move_unit(graph, state, moved[i, 0], moved[i, 1], moved[i, 2])
        for i in range(blocks - 1, -1, -1):
            move_block(graph, state, moved_block[i, 0], moved_block[i, 1])

