"""Elementary parts of a search: random numbers, what a change of several units and blocks costs, and doing it.

A change moves units and blocks from a source device to a target, and, in exchange, others from the target to the source. It is
**tallied** first: for every net that it touches, how many users go to the target, less those that come back. From that
its cost follows without doing it; most changes are turned down.

Arrays come one by one, not in tuples: reading an array from a tuple costs reference counting in compiled code, and these
functions run millions of times. For the same reason the innermost loops index with unsigned numbers, which can't be negative:
signed ones would be checked for that.
"""

from __future__ import annotations

import numba as nb
import numpy as np

TOUCHED = 1 << 24
"""Added to the tally of every net that is touched, so that zero means that it isn't."""


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
def tally_units(moved, first, last, change, groups, tile_ptr, tile_atom, tally, touched, found):
    """Count the nets of some units; returns how many nets are touched."""
    for i in range(first, last):
        tile, g = moved[i, 0], moved[i, 1]
        for p in range(tile_ptr[tile], tile_ptr[tile + 1]):
            net = np.uint64(tile_atom[np.uint64(p)] * groups + g)
            if tally[net] == 0:
                tally[net] = TOUCHED
                touched[found] = net
                found += 1
            tally[net] += change
    return found


@nb.njit(cache=True, forceinline=True)
def tally_block(block, change, groups, block_ptr, block_atom, tally, touched, found):
    """Count the nets of a block, whose owner changes; returns how many nets are touched."""
    for p in range(block_ptr[block], block_ptr[block + 1]):
        for net in range(block_atom[p] * groups, (block_atom[p] + 1) * groups):
            if tally[net] == 0:
                tally[net] = TOUCHED
                touched[found] = net
                found += 1
            tally[net] += change
    return found


@nb.njit(cache=True, forceinline=True)
def cost_of_change(tally, touched, found, source, target, x, y, device_cost, node_cost, on_device, on_node):
    """What the tallied change costs in rows; x and y are the nodes of source and target."""
    delta = 0.0
    s, t = np.uint64(source), np.uint64(target)
    x, y = np.uint64(x), np.uint64(y)
    for i in range(found):
        net = np.uint64(touched[i])
        change = tally[net] - TOUCHED
        a, b = on_device[net, s], on_device[net, t]
        gained = np.int64(a - change > 0) - np.int64(a > 0) + np.int64(b + change > 0) - np.int64(b > 0)
        delta += gained * device_cost[net]
        if x != y:
            a, b = on_node[net, x], on_node[net, y]
            gained = np.int64(a - change > 0) - np.int64(a > 0) + np.int64(b + change > 0) - np.int64(b > 0)
            delta += gained * node_cost[net]
    return delta


@nb.njit(cache=True, forceinline=True)
def count_change(tally, touched, found, source, target, x, y, on_device, on_node, spread, shared, place, num_shared):
    """Do the tallied change to the counts of the nets; returns the new number of shared nets (see `list_shared`)."""
    for i in range(found):
        net = touched[i]
        change = tally[net] - TOUCHED
        spread[net] -= np.int64(on_device[net, source] > 0) + np.int64(on_device[net, target] > 0)
        on_device[net, source] -= change
        on_device[net, target] += change
        spread[net] += np.int64(on_device[net, source] > 0) + np.int64(on_device[net, target] > 0)
        if x != y:
            on_node[net, x] -= change
            on_node[net, y] += change
        if (spread[net] > 1) == (place[net] >= 0):
            continue
        if spread[net] > 1:
            shared[num_shared] = net
            place[net] = num_shared
            num_shared += 1
        else:
            num_shared -= 1
            last = shared[num_shared]
            shared[place[net]] = last
            place[last] = place[net]
            place[net] = -1
    return num_shared


@nb.njit(cache=True)
def list_shared(on_device):
    """Nets that several devices use: (devices of each net, list of nets, place of each net in it or -1, their number)."""
    nets = len(on_device)
    spread, shared, place = np.zeros(nets, np.int32), np.empty(nets, np.int32), np.full(nets, -1, np.int32)
    found = 0
    for net in range(nets):
        for device in range(on_device.shape[1]):
            spread[net] += on_device[net, device] > 0
        if spread[net] > 1:
            shared[found] = net
            place[net] = found
            found += 1
    return spread, shared, place, found


@nb.njit(cache=True, forceinline=True)
def excess_change(load, source, target, amount, source_limit, target_limit):
    """Change of the total excess if ``amount`` goes from one device (or node) to another."""
    before = max(0, load[source] - source_limit) + max(0, load[target] - target_limit)
    return max(0, load[source] - amount - source_limit) + max(0, load[target] + amount - target_limit) - before
