"""Devices whose divisions are cut in ways of their own, because others wait for them."""

from __future__ import annotations

import numba as nb
import numpy as np

from hf_dcp.planning.divisions import Trial, assign_device
from hf_dcp.planning.links import Links
from hf_dcp.planning.placement.moves import random_below
from hf_dcp.planning.timeline import Timeline, list_involved, number_exchanges, put_device, run
from hf_dcp.planning.transfers import Transfers
from hf_dcp.planning.units import Units

GAPS = 3
LOCAL = np.array([0.0, 0.3, 0.5, 0.8])
KEPT = np.array([0.0, 0.08, 0.12, 0.15, 0.2, 0.25])
HEAD = np.array([1.0, 1.0, 0.1, 0.14, 0.17, 0.2, 0.25, 1.0])
"""What is tried, see `Trial`; whole first divisions more often than small ones."""
MOST = 0.4
"""No way is taken in which one of three or more divisions has more of a device's compute."""
BETTER = 1 - 1e-9


@nb.njit(cache=True)
def adjust(
    line: Timeline,
    transfers: Transfers,
    units: Units,
    links: Links,
    phase: np.ndarray,
    node: np.ndarray,
    divisions: int,
    tries: int,
    seed: int,
) -> float:
    """Cut the divisions of one device after another in other ways, chosen at random, as long as the last rank is done earlier.

    Args:
        line: holds the schedule that ``phase`` says.
        phase: int32[units], changed in place.
        node: int32[world_size]
        divisions: the most that a device may have.
        tries: how many ways are tried.

    Returns:
        Seconds until the last rank is done.
    """
    rng = np.array([np.uint64(2 * seed + 1) * np.uint64(0x9E3779B97F4A7C15)], np.uint64)
    involved = np.empty(len(node), np.int64)
    clock = run(line, links, node, np.inf)
    best, count = clock.max(), list_involved(line, node, clock, involved)
    for _ in range(tries):
        if count == 0:
            break
        device = involved[random_below(rng, count)]
        own = units.front[units.begin[device] : units.begin[device + 1]]
        before = phase[own]
        assign_device(transfers, units, links, _random_way(rng, divisions), device, phase)
        if np.all(phase[own] == before):
            continue
        put_device(line, transfers, units, links, phase, device)
        if divisions < 3 or line.compute[device].max() <= MOST * line.compute[device].sum():
            number_exchanges(line, transfers)
            clock = run(line, links, node, best)
            if clock.max() < best * BETTER:
                best, count = clock.max(), list_involved(line, node, clock, involved)
                continue
        phase[own] = before
        put_device(line, transfers, units, links, phase, device)
    number_exchanges(line, transfers)
    return best


@nb.njit(cache=True)
def _random_way(rng, divisions):
    first, gap, gap_behind = random_below(rng, 2), random_below(rng, GAPS), random_below(rng, 2)
    local, kept = LOCAL[random_below(rng, len(LOCAL))], KEPT[random_below(rng, len(KEPT))]
    return Trial(divisions, first, gap, local, kept, HEAD[random_below(rng, len(HEAD))], gap_behind)
