"""Refinement: annealing by counted moves, with the moves that matter for rows shared by tiles.

Moves: one tile; all tiles of a net on a device, or those up to or from one of them; the tiles of two nets against each
other; a block's ownership, alone or against another block's, with or without the tiles of its queries. Random numbers,
thresholds and schedule use only integer and basic floating-point arithmetic, so that results are equal on all machines.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from hf_dcp.planning.placement.moves import move_block, move_unit, random_below
from hf_dcp.planning.placement.state import Graph, State

# Annealing accepts a worse move of cost d at temperature T if d <= T * -log(u), u uniform: a table of 1024 quantiles.
_QUANTILES = np.round(-np.log((np.arange(1024) + 0.5) / 1024) * 4096) / 4096

TILES = (700, 850, 500)
"""Mix of moves, per thousand: below the first number tiles move, below the second they are swapped, else a block moves;
then its tiles come along this often."""
ROWS = (0, 0, 1000)
"""Only blocks with the tiles of their queries: tiles that are local stay so."""
SMALLEST_TEMPERATURE = 0.05
"""Where cooling ends, as a share of the temperature that it begins with."""


def refine(
    graph: Graph,
    state: State,
    effort: int,
    seed: int,
    temperature: float = 0.0,
    mix: tuple[int, int, int] = TILES,
    patience: float = 0.0,
    floor: float = 0.004,
) -> None:
    """Improve a placement in place.

    Args:
        effort: how much is tried: moves, and a quarter for every tile that they touch.
        seed: of the random choices.
        mix: of moves, `TILES` or `ROWS`.
        patience: over this share of the effort, what exceeds the limits becomes more expensive bit by bit: a seed that is
            cheap but uneven is repaired where that costs least, not by the first moves that come along.
        floor: the pressure of limits that patience begins with, as a share of the full one.
        temperature: as a share of the mean cost of a net; 0: only accept what is not worse.
    """
    if effort <= 0 or len(graph.node) == 1 or len(graph.tile_work) == 0:
        return
    mean = float(graph.device_cost.mean())
    _anneal(graph, state, effort, np.uint64(seed * 2 + 1), temperature * mean, mix, patience, floor, _QUANTILES)


@nb.njit(cache=True, forceinline=True)
def _member(rng, ptr, member, group):
    """A random member of a group."""
    return member[ptr[group] + random_below(rng, ptr[group + 1] - ptr[group])]


@nb.njit(cache=True, forceinline=True)
def _collect(begin, end, member, g, groups, device, since, until, unit, moved, count):
    """Append the units of group g on a device, tiles ``since`` to ``until`` of a list, to the moved ones."""
    for p in range(begin, end):
        tile = member[p]
        if unit[tile, g] == device and since <= tile <= until:
            moved[count] = tile * groups + g
            count += 1
    return count


@nb.njit(cache=True)
def _anneal(graph, state, effort, seed, temperature, mix, patience, floor, quantiles):
    tile_ptr, tile_atom, atom_ptr, atom_tile = graph.tile_ptr, graph.tile_atom, graph.atom_ptr, graph.atom_tile
    atom_block, block_ptr, block_atom = graph.atom_block, graph.block_ptr, graph.block_atom
    row_ptr, row_tile, tile_work, block_size = graph.row_ptr, graph.row_tile, graph.tile_work, graph.block_size
    device_cost, node_cost, node, node_limit = graph.device_cost, graph.node_cost, graph.node, graph.node_limit
    limit, penalty = graph.compute_limit, graph.compute_penalty
    token_limit, token_penalty = graph.token_limit, graph.token_penalty
    unit, owner, on_device, on_node = state.unit, state.owner, state.on_device, state.on_node
    work, node_work, tokens = state.work, state.node_work, state.tokens

    rng = np.array([seed * np.uint64(0x9E3779B97F4A7C15)], np.uint64)
    tiles, groups = unit.shape
    blocks, devices = len(owner), len(node)
    moved, came_from = np.empty(2 * tiles * groups + 2, np.int64), np.empty(2 * tiles * groups + 2, np.int32)
    now, spent, next_cooling = temperature, 0, 0
    while spent < effort:
        if spent >= next_cooling:
            left = (effort - spent) / effort
            now = temperature * (left * left * left + SMALLEST_TEMPERATURE)
            next_cooling += effort // 128 + 1
            pressure = min(1.0, spent / (patience * effort)) if patience > 0.0 else 1.0
            pressure = floor + (1.0 - floor) * pressure * pressure
            penalty, token_penalty = graph.compute_penalty * pressure, graph.token_penalty * pressure
        dice = random_below(rng, 1000)
        delta, count, first, block, other = 0.0, 0, 0, -1, -1
        source, target = 0, 0
        if dice < mix[1]:
            tile, g = random_below(rng, tiles), random_below(rng, groups)
            source = unit[tile, g]
            atom = _member(rng, tile_ptr, tile_atom, tile)
            towards = atom if random_below(rng, 2) == 0 else _member(rng, tile_ptr, tile_atom, tile)
            partner = _member(rng, atom_ptr, atom_tile, towards)
            target = unit[partner, g]
            if dice < mix[0]:
                kind = random_below(rng, 128)
                if kind < 40:
                    target = owner[atom_block[towards]]
                elif kind >= 124:
                    target = random_below(rng, devices)
            if source == target:
                spent += 1
                continue
            begin, end = atom_ptr[atom], atom_ptr[atom + 1]
            if dice >= mix[0]:
                first = _collect(begin, end, atom_tile, g, groups, source, 0, tiles, unit, moved, 0)
                back = _member(rng, tile_ptr, tile_atom, partner)
                begin, end = atom_ptr[back], atom_ptr[back + 1]
                count = _collect(begin, end, atom_tile, g, groups, target, 0, tiles, unit, moved, first)
            else:
                kind = random_below(rng, 8)
                if kind < 4:
                    moved[0] = tile * groups + g
                    count = 1
                else:
                    since, until = tile if kind == 6 else 0, tile if kind == 7 else tiles
                    count = _collect(begin, end, atom_tile, g, groups, source, since, until, unit, moved, 0)
                first = count
        else:
            block = random_below(rng, blocks)
            source, target = owner[block], np.int32(random_below(rng, devices))  # type: ignore[assignment]
            if block_ptr[block + 1] > block_ptr[block] and random_below(rng, 10) < 8:
                atom = _member(rng, block_ptr, block_atom, block)
                target = unit[_member(rng, atom_ptr, atom_tile, atom), random_below(rng, groups)]
            if source == target:
                spent += 1
                continue
            if tokens[target] + block_size[block] > token_limit[target]:
                for _ in range(4 * devices):
                    z = random_below(rng, blocks)
                    if owner[z] == target:
                        other = z
                        break
                if other < 0:
                    spent += 1
                    continue
            delta += move_block(
                block, target, groups, block_ptr, block_atom, block_size, device_cost, node_cost, node, token_limit,
                token_penalty, owner, on_device, on_node, tokens,
            )  # fmt: skip
            if other >= 0:
                delta += move_block(
                    other, source, groups, block_ptr, block_atom, block_size, device_cost, node_cost, node, token_limit,
                    token_penalty, owner, on_device, on_node, tokens,
                )  # fmt: skip
            if random_below(rng, 1000) < mix[2]:
                begin, end = row_ptr[block], row_ptr[block + 1]
                for g in range(groups):
                    count = _collect(begin, end, row_tile, g, groups, source, 0, tiles, unit, moved, count)
                first = count
                if other >= 0:
                    begin, end = row_ptr[other], row_ptr[other + 1]
                    for g in range(groups):
                        count = _collect(begin, end, row_tile, g, groups, target, 0, tiles, unit, moved, count)
        for i in range(count):
            tile, g = moved[i] // groups, moved[i] % groups
            came_from[i] = unit[tile, g]
            delta += move_unit(
                tile, g, target if i < first else source, tile_ptr, tile_atom, tile_work, device_cost, node_cost, node,
                limit, node_limit, penalty, unit, on_device, on_node, work, node_work,
            )  # fmt: skip
        spent += 1 + count // 4
        if delta <= 0.0 or (now > 0.0 and delta <= now * quantiles[random_below(rng, len(quantiles))]):
            continue
        for i in range(count - 1, -1, -1):
            move_unit(
                moved[i] // groups, moved[i] % groups, came_from[i], tile_ptr, tile_atom, tile_work, device_cost,
                node_cost, node, limit, node_limit, penalty, unit, on_device, on_node, work, node_work,
            )  # fmt: skip
        if block >= 0:
            move_block(
                block, source, groups, block_ptr, block_atom, block_size, device_cost, node_cost, node, token_limit,
                token_penalty, owner, on_device, on_node, tokens,
            )  # fmt: skip
            if other >= 0:
                move_block(
                    other, target, groups, block_ptr, block_atom, block_size, device_cost, node_cost, node, token_limit,
                    token_penalty, owner, on_device, on_node, tokens,
                )  # fmt: skip
