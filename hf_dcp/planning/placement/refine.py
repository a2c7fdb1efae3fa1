"""Refinement: annealing by counted moves, with the moves that matter for rows shared by tiles.

Moves: one tile; all tiles of a net on a device, or those up to or from one of them; the tiles of two nets against each
other; a block's ownership, alone or against another block's, with or without the tiles of its queries. Random numbers,
thresholds and schedule use only integer and basic floating-point arithmetic, so that results are equal on all machines.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from hf_dcp.planning.placement.moves import (
    cost_of_change,
    count_change,
    excess_change,
    list_shared,
    random_below,
    tally_block,
    tally_units,
)
from hf_dcp.planning.placement.state import Graph, State

# Annealing accepts a worse move of cost d at temperature T if d <= T * -log(u), u uniform: a table of 1024 quantiles.
_QUANTILES = np.round(-np.log((np.arange(1024) + 0.5) / 1024) * 4096) / 4096

TILES = (550, 650, 500)
"""Mix of moves, per thousand: below the first number tiles move, below the second they are swapped, else a block moves;
then its tiles come along this often."""
ROWS = (0, 0, 1000)
"""Only blocks with the tiles of their queries: tiles that are local stay so."""
SMALLEST_TEMPERATURE = 0.05
"""Where cooling ends, as a share of the temperature that it begins with."""
TRIES = 3
"""So often another user of a net is looked for."""
PROPOSAL = 8
"""Work of a proposal as such, in nets touched."""
LOOKED_AT = 2
"""So many units that are looked at, because a move may take them along, are as much work as a net touched."""


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
        effort: how much is tried: nets touched by moves, `PROPOSAL` for every move, and the units looked at for it.
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
def _collect(begin, end, member, g, device, since, until, unit, moved, count):
    """Append the units of group g on a device, tiles ``since`` to ``until`` of a list, to the moved ones."""
    for p in range(begin, end):
        tile = member[p]
        if unit[np.uint64(tile), np.uint64(g)] == device and since <= tile <= until:
            moved[count, 0], moved[count, 1] = tile, g
            count += 1
    return count


@nb.njit(cache=True, forceinline=True)
def _random_net(rng, shared, num_shared, nets):
    """Mostly a net that several devices use: only there is something to gain."""
    if num_shared > 0 and random_below(rng, 16) > 0:
        return np.int64(shared[random_below(rng, num_shared)])
    return random_below(rng, nets)


@nb.njit(cache=True, forceinline=True)
def _propose_tiles(rng, net, swap, tile_ptr, tile_atom, atom_ptr, atom_tile, atom_block, unit, owner, devices, moved):
    """A random change of tiles of a net: (source, target, units that go, those and the ones that come back, looked at)."""
    tiles, groups = unit.shape
    towards, g = net // groups, net % groups
    tile = _member(rng, atom_ptr, atom_tile, towards)
    source = unit[tile, g]
    partner, target = tile, source
    kind = random_below(rng, 128)
    if kind < 40 and not swap:
        target = owner[atom_block[towards]]
    elif kind >= 124 and not swap:
        target = np.int32(random_below(rng, devices))
    for _ in range(TRIES):
        if target != source:
            break
        partner = _member(rng, atom_ptr, atom_tile, towards)
        target = unit[partner, g]
    if source == target:
        return source, target, 0, 0, 0
    kind = random_below(rng, 16)
    if kind < 8:
        moved[0, 0], moved[0, 1] = tile, g
        if not swap:
            return source, target, 1, 1, 0
        moved[1, 0], moved[1, 1] = partner, g
        return source, target, 1, 2, 0
    atom = towards if kind % 2 == 0 else _member(rng, tile_ptr, tile_atom, tile)
    begin, end = atom_ptr[atom], atom_ptr[atom + 1]
    if swap:
        first = _collect(begin, end, atom_tile, g, source, 0, tiles, unit, moved, 0)
        back = _member(rng, tile_ptr, tile_atom, partner)
        looked = end - begin + atom_ptr[back + 1] - atom_ptr[back]
        begin, end = atom_ptr[back], atom_ptr[back + 1]
        count = _collect(begin, end, atom_tile, g, target, 0, tiles, unit, moved, first)
        return source, target, first, count, looked
    since, until = tile if kind >= 14 else 0, tile if kind in (12, 13) else tiles
    count = _collect(begin, end, atom_tile, g, source, since, until, unit, moved, 0)
    return source, target, count, count, end - begin


@nb.njit(cache=True, forceinline=True)
def _block_on(rng, owner, device, tries):
    """A random block that the device owns, or -1."""
    for _ in range(tries):
        block = random_below(rng, len(owner))
        if owner[block] == device:
            return block
    return np.int64(-1)


@nb.njit(cache=True, forceinline=True)
def _propose_block(
    rng, net, full, atom_ptr, atom_tile, atom_block, unit, owner, devices, block_size, tokens, token_limit
):
    """A random change of ownership: (block, target, block that comes back or -1); block -1: none.

    ``full`` is a device with too many tokens, or -1: now and then one of its blocks goes anywhere.
    """
    groups = unit.shape[1]
    atom = net // groups
    block = np.int64(atom_block[atom])
    if full >= 0 and tokens[full] > token_limit[full] and random_below(rng, 4) == 0:
        block = _block_on(rng, owner, full, 4 * devices)
        if block < 0:
            return block, np.int32(full), block
    target = owner[block]
    if owner[block] != full and random_below(rng, 10) > 0:
        for _ in range(TRIES):
            if target != owner[block]:
                break
            target = unit[_member(rng, atom_ptr, atom_tile, atom), net % groups]
    else:
        target = np.int32(random_below(rng, devices))
    if owner[block] == target:
        return np.int64(-1), target, np.int64(-1)
    if tokens[target] + block_size[block] <= token_limit[target]:
        return block, target, np.int64(-1)
    other = _block_on(rng, owner, target, 4 * devices)
    return (block if other >= 0 else other), target, other


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
    groups = unit.shape[1]
    devices = len(node)
    device_cost, node_cost = np.repeat(device_cost, groups), np.repeat(node_cost, groups)
    moved = np.empty((2 * unit.size + 2, 2), np.int32)
    tally, touched = np.zeros(len(on_device), np.int32), np.empty(len(on_device), np.int32)
    spread, shared, place, num_shared = list_shared(on_device)
    nets = len(on_device)
    now, spent, next_cooling, full = temperature, 0, 0, np.int64(-1)
    while spent < effort:
        if spent >= next_cooling:
            left = (effort - spent) / effort
            now = temperature * (left * left * left + SMALLEST_TEMPERATURE)
            next_cooling += effort // 128 + 1
            full = np.argmax(tokens - token_limit)
            pressure = min(1.0, spent / (patience * effort)) if patience > 0.0 else 1.0
            pressure = floor + (1.0 - floor) * pressure * pressure
            penalty, token_penalty = graph.compute_penalty * pressure, graph.token_penalty * pressure
        dice = random_below(rng, 1000)
        net = _random_net(rng, shared, num_shared, nets)
        block, other, found, first, count, looked = -1, -1, 0, 0, 0, 0
        spent += PROPOSAL
        if dice < mix[1]:
            source, target, first, count, looked = _propose_tiles(
                rng,
                net,
                dice >= mix[0],
                tile_ptr,
                tile_atom,
                atom_ptr,
                atom_tile,
                atom_block,
                unit,
                owner,
                devices,
                moved,
            )
            if count == 0:
                continue
        else:
            block, target, other = _propose_block(
                rng, net, full, atom_ptr, atom_tile, atom_block, unit, owner, devices, block_size, tokens, token_limit
            )
            if block < 0:
                continue
            source = owner[block]
            found = tally_block(block, 1, groups, block_ptr, block_atom, tally, touched, found)
            if other >= 0:
                found = tally_block(other, -1, groups, block_ptr, block_atom, tally, touched, found)
            if random_below(rng, 1000) < mix[2]:
                looked = groups * (row_ptr[block + 1] - row_ptr[block])
                for g in range(groups):
                    first = _collect(
                        row_ptr[block], row_ptr[block + 1], row_tile, g, source, 0, len(unit), unit, moved, first
                    )
                count = first
                if other >= 0:
                    looked += groups * (row_ptr[other + 1] - row_ptr[other])
                    for g in range(groups):
                        count = _collect(
                            row_ptr[other], row_ptr[other + 1], row_tile, g, target, 0, len(unit), unit, moved, count
                        )
        found = tally_units(moved, 0, first, 1, groups, tile_ptr, tile_atom, tally, touched, found)
        found = tally_units(moved, first, count, -1, groups, tile_ptr, tile_atom, tally, touched, found)
        spent += found + looked // LOOKED_AT
        x, y = node[source], node[target]
        delta = cost_of_change(tally, touched, found, source, target, x, y, device_cost, node_cost, on_device, on_node)
        amount, size = 0, 0
        for i in range(first):
            amount += tile_work[moved[i, 0]]
        for i in range(first, count):
            amount -= tile_work[moved[i, 0]]
        if amount != 0:
            excess = excess_change(work, source, target, amount, limit[source], limit[target])
            if x != y:
                excess += excess_change(node_work, x, y, amount, node_limit[x], node_limit[y])
            delta += penalty * excess
        if block >= 0:
            size = block_size[block] - (block_size[other] if other >= 0 else 0)
            delta += token_penalty * excess_change(
                tokens, source, target, size, token_limit[source], token_limit[target]
            )
        if delta <= 0.0 or (now > 0.0 and delta <= now * quantiles[random_below(rng, len(quantiles))]):
            num_shared = count_change(
                tally, touched, found, source, target, x, y, on_device, on_node, spread, shared, place, num_shared
            )
            for i in range(count):
                unit[moved[i, 0], moved[i, 1]] = target if i < first else source
            work[source] -= amount
            work[target] += amount
            node_work[x] -= amount
            node_work[y] += amount
            if block >= 0:
                owner[block] = target
                tokens[source] -= size
                tokens[target] += size
                if other >= 0:
                    owner[other] = source
        for i in range(found):
            tally[touched[i]] = 0
