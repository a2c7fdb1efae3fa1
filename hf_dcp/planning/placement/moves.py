"""Elementary moves: one unit to another device, one block to another owner, and what that changes.

Arrays come one by one, not in tuples: reading an array from a tuple costs reference counting in compiled code, and these
functions run millions of times.
"""

from __future__ import annotations

import numba as nb
import numpy as np


@nb.njit(cache=True, forceinline=True)
def random_below(rng, below):
    """A number in [0, below): xorshift64*."""
    x = rng[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    rng[0] = x
    high = (x * np.uint64(2685821657736338717)) >> np.uint64(33)
    return np.int64((high * np.uint64(below)) >> np.uint64(31))


@nb.njit(cache=True, forceinline=True)
def shift_net(net, source, target, device_price, node_price, node, on_device, on_node):
    """One user of a net goes from one device to another; returns the change of cost."""
    delta = 0.0
    on_device[net, source] -= 1
    if on_device[net, source] == 0:
        delta -= device_price
    if on_device[net, target] == 0:
        delta += device_price
    on_device[net, target] += 1
    x, y = node[source], node[target]
    if x != y:
        on_node[net, x] -= 1
        if on_node[net, x] == 0:
            delta -= node_price
        if on_node[net, y] == 0:
            delta += node_price
        on_node[net, y] += 1
    return delta


@nb.njit(cache=True, forceinline=True)
def excess_change(load, source, target, amount, source_limit, target_limit):
    """Change of the total excess when ``amount`` goes from one device (or node) to another; does it, too."""
    before = max(0, load[source] - source_limit) + max(0, load[target] - target_limit)
    load[source] -= amount
    load[target] += amount
    return max(0, load[source] - source_limit) + max(0, load[target] - target_limit) - before


@nb.njit(cache=True, forceinline=True)
def move_unit(
    tile, g, target, tile_ptr, tile_atom, tile_work, device_cost, node_cost, node, limit, node_limit, penalty,
    unit, on_device, on_node, work, node_work,
):  # fmt: skip
    """Compute a unit on another device; returns the change of cost, penalties included."""
    source = unit[tile, g]
    if source == target:
        return 0.0
    delta, groups = 0.0, unit.shape[1]
    for p in range(tile_ptr[tile], tile_ptr[tile + 1]):
        atom = tile_atom[p]
        delta += shift_net(
            atom * groups + g, source, target, device_cost[atom], node_cost[atom], node, on_device, on_node
        )
    amount = tile_work[tile]
    excess = excess_change(work, source, target, amount, limit[source], limit[target])
    x, y = node[source], node[target]
    if x != y:
        excess += excess_change(node_work, x, y, amount, node_limit[x], node_limit[y])
    unit[tile, g] = target
    return delta + penalty * excess


@nb.njit(cache=True)
def move_block(
    block, target, groups, block_ptr, block_atom, block_size, device_cost, node_cost, node, limit, penalty,
    owner, on_device, on_node, tokens,
):  # fmt: skip
    """Give a block another owner; returns the change of cost, penalties included."""
    source = owner[block]
    if source == target:
        return 0.0
    delta = 0.0
    for p in range(block_ptr[block], block_ptr[block + 1]):
        atom = block_atom[p]
        for net in range(atom * groups, (atom + 1) * groups):
            delta += shift_net(net, source, target, device_cost[atom], node_cost[atom], node, on_device, on_node)
    owner[block] = target
    return delta + penalty * excess_change(tokens, source, target, block_size[block], limit[source], limit[target])
