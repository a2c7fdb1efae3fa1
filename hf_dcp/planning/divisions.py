"""Divisions: in which phase a device computes each of its tiles.

Time is cut into **phases**. In phase p a device computes its division of phase p, while rows for later ones arrive and
partial results of earlier ones leave (`hf_dcp.planning.timeline`). Rows that come straight from their owner can be there
in phase 1, rows relayed by a gateway in phase 2. A device has at most T divisions (paper section 4.3, with the last one no
longer taking whatever remains).

**Order.** Tiles on local rows come first: they cover the first exchange. Then those on rows of the own node, whose links are
fast; then those on rows that other nodes send, and those on relayed rows. Some tiles are kept for the last division, behind
which the results of the others go home: local ones, and those whose own results have a short way, or none. Where nearly all go
to other nodes, a small last division is still the shortest return.

**Cuts.** A device that has computed c seconds may begin a division if all its rows are there. By that, rows that took x
seconds on its links since the beginning are late by x - c. The least lateness e with which T divisions, none larger than
`LARGEST_SHARE`, hold all tiles is found by bisection; then, for that e, the most even divisions.

**What can't be covered.** On a device, let L be the seconds of its local tiles, F the seconds that its first exchange takes,
which it needs before any other tile, and R those of its last return, after which nothing but local tiles can be left. Before
F is over and during R only local tiles can be computed, so that no schedule with these two exchanges waits less than
max(0, F + R - L): `hf_dcp.planning.exposure.uncoverable`.
"""

from __future__ import annotations

from typing import NamedTuple

import numba as nb
import numpy as np

from hf_dcp.planning.timeline import INSIDE, RELAYED, Links, Side

LARGEST_SHARE = 0.38
"""No division holds more of a device's compute, if there are at least three."""
FULL = 0.98
"""Late divisions are filled to this share of the largest, so that relayed rows have as much time as can be had."""
SEARCHES = 6
"""Steps of a bisection."""


class Units(NamedTuple):
    """Tiles of one head group each, and what their order on a device depends on."""

    device: np.ndarray
    """int32[tiles, groups]"""
    seconds: np.ndarray
    """float64[tiles]: of compute."""
    begin: np.ndarray
    """int64[world_size + 1]: where each device's units begin in the two orders."""
    front: np.ndarray
    """int64[units]: as they are computed, by device; a unit is ``tile * groups + group``."""
    back: np.ndarray
    """int64[units]: in which they are kept for the last division, by device."""
    kind: np.ndarray
    """int8[units]: where rows come from: 0 local, 1 the own node, 2 other nodes, 3 a gateway."""
    returns: np.ndarray
    """int8[units]: the same for where partial results go, 0 if there are none."""


def make_units(
    device: np.ndarray,
    seconds: np.ndarray,
    sides: tuple[Side, Side],
    blocks: tuple[np.ndarray, np.ndarray],
    world: int,
) -> Units:
    """
    Args:
        device: int32[tiles, groups].
        seconds: float64[tiles].
        blocks: int32[tiles] each, the Q and the KV block of every tile.
    """
    (kind_q, returns_q), (kind_kv, returns_kv) = (_kinds(device, side) for side in sides)
    kind, returns = np.maximum(kind_q, kind_kv), np.maximum(returns_q, returns_kv)
    flat, groups = device.ravel().astype(np.int64), device.shape[1]
    # units that read the same remote rows, of the side whose rows come from farther away, are computed together
    by_q = (kind_q > kind_kv) | ((kind_q == kind_kv) & _reads_more_q(device, sides, world).ravel())
    q, kv = (np.repeat(block, groups).astype(np.int64) for block in blocks)
    most = int(max(q.max(initial=0), kv.max(initial=0))) + 1
    number = np.where(by_q, q, most + kv) * groups + np.tile(np.arange(groups), len(seconds))
    span = 2 * most * groups
    front = np.argsort(((flat * 4 + kind) * 4 + 3 - returns) * span + number, kind="stable")
    back = np.argsort(((flat * 4 + returns) * 4 + 3 - kind) * span + number, kind="stable")
    begin = np.searchsorted(flat[front], np.arange(world + 1))
    return Units(device, seconds, begin, front, back, kind, returns)


def _reads_more_q(device: np.ndarray, sides: tuple[Side, Side], world: int) -> np.ndarray:
    """Whether the device of a unit receives more bytes of Q rows than of KV rows: bool[tiles, groups]."""
    q, kv = (np.bincount(side.device, weights=side.inputs + side.partials, minlength=world) for side in sides)
    return (q > kv)[device]


@nb.njit(cache=True)
def _kinds(device, side):
    """(Where the rows of every unit on this side come from, where its results go): int8[units] each."""
    tiles, groups = device.shape
    kind, returns = np.zeros(tiles * groups, np.int8), np.zeros(tiles * groups, np.int8)
    for t in range(tiles):
        for g in range(groups):
            base, unit = (device[t, g] * groups + g) * side.num_atoms, t * groups + g
            for p in range(side.ptr[t], side.ptr[t + 1]):
                use = side.lookup[base + side.atom[p]]
                if use >= 0:
                    kind[unit] = max(kind[unit], side.kind[use])
                    if side.partials[use] > 0:
                        returns[unit] = max(returns[unit], side.kind[use])
    return kind, returns


class Trial(NamedTuple):
    """A way to cut divisions."""

    divisions: int
    """At most this many per device."""
    first: int = 0
    """The phase of the first one: 0, or 1: it computes local tiles and others, and waits for their rows."""
    gap: int = 0
    """After so many divisions a phase goes by without one, in which gateways pass rows on; 0: none does."""
    local: float = 0.0
    """So much of the local tiles is kept for the last division."""
    kept: float = 0.0
    """So much of a device's compute, in other tiles, is: those whose results have the shortest way home."""
    head: float = 1.0
    """The first division holds at most so much of what a device computes on average: so all are done with it at about the same
    time, and gateways can pass rows on."""
    gap_behind: int = 0
    """1: a phase goes by in front of the last division, in which gateways receive results."""


@nb.njit(cache=True)
def assign_phases(units: Units, q: Side, kv: Side, links: Links, trial: Trial) -> np.ndarray:
    """The phase of every unit: int32[units]."""
    phase = np.zeros(len(units.kind), np.int32)
    seen_q, seen_kv = np.zeros(len(q.kind), np.bool_), np.zeros(len(kv.kind), np.bool_)
    even = units.seconds.sum() * units.device.shape[1] / (len(units.begin) - 1)
    for d in range(len(units.begin) - 1):
        own = slice(units.begin[d], units.begin[d + 1])
        front, back = units.front[own], units.back[own].copy()
        if len(front) > 0:
            kept = _kept(units, back, trial.local, trial.kept) if trial.divisions > 1 else 0
            _assign_device(units, q, kv, links, d, trial, even, front, back, kept, seen_q, seen_kv, phase)
    return phase


@nb.njit(cache=True)
def _kept(units, back, local_share, kept_share):
    """Rearrange ``back`` so that what is kept for the last division comes first, and count it."""
    groups = units.device.shape[1]
    total, local = 0.0, 0.0
    for u in back:
        total += units.seconds[u // groups]
        if units.kind[u] == 0:
            local += units.seconds[u // groups]
    if total == local:
        return 0
    kept = 0
    room = np.array([local_share * local, kept_share * total])
    for i in range(len(back)):
        u = back[i]
        seconds, which = units.seconds[u // groups], 0 if units.kind[u] == 0 else 1
        if seconds / 2 <= room[which]:
            room[which] -= seconds
            back[i], back[kept] = back[kept], u
            kept += 1
    return kept


@nb.njit(cache=True)
def _assign_device(units, q, kv, links, d, trial, even, front, back, kept, seen_q, seen_kv, phase):
    groups = units.device.shape[1]
    last = 0
    for i in range(kept):
        phase[back[i]] = -1
    order, total = np.empty(len(front) - kept, np.int64), 0.0
    count = 0
    for u in front:
        total += units.seconds[u // groups]
        last = max(last, min(units.kind[u], 3) - (units.kind[u] >= 2))
        if phase[u] == 0:
            order[count] = u
            count += 1
    done, there = _prefixes(units, q, kv, links, d, order, seen_q, seen_kv)
    early, most = np.empty(count, np.int64), LARGEST_SHARE * total if trial.divisions > 2 else np.inf
    for i in range(count):
        early[i] = units.kind[order[i]] - (units.kind[order[i]] >= 2)
    phases = _phases(trial.divisions - (kept > 0), trial.first, trial.gap, early, last)
    patient, room, near = early.copy(), 0.0, units.kind[order] <= INSIDE
    later = phases[trial.gap] if 0 < trial.gap < len(phases) else np.int64(RELAYED)
    for i in range(count - 1, -1, -1):  # what comes last is given a phase more, in which its gateway receives it
        room += units.seconds[order[i] // groups]
        if units.kind[order[i]] == RELAYED:
            patient[i] = later if room <= most * FULL * (phases >= later).sum() else early[i]
    head = trial.head * even
    ends = _cuts(done, there, near, patient, phases, most, head)
    if ends[-1] < count:
        ends = _cuts(done, there, near, early, phases, most, head)
    if ends[-1] < count:
        ends = _cuts(done, there, near, early, phases, np.inf, np.inf)
    begin, latest = 0, -1
    for c in range(len(phases)):
        for i in range(begin, ends[c]):
            phase[order[i]] = latest = phases[c]
        begin = ends[c]
    for i in range(kept):
        phase[back[i]] = max(latest + 1 + trial.gap_behind, last)


@nb.njit(cache=True)
def _prefixes(units, q, kv, links, d, order, seen_q, seen_kv):
    """(Compute seconds, when the rows are there at best) of the first 1, 2, ... units."""
    groups = units.device.shape[1]
    done, there = np.empty(len(order)), np.empty(len(order))
    seconds, queue = 0.0, np.zeros(4)
    for i in range(len(order)):
        t, g = order[i] // groups, order[i] % groups
        seconds += units.seconds[t]
        for side, seen in ((q, seen_q), (kv, seen_kv)):
            base = (d * groups + g) * side.num_atoms
            for p in range(side.ptr[t], side.ptr[t + 1]):
                use = side.lookup[base + side.atom[p]]
                if use >= 0 and not seen[use]:
                    seen[use] = True
                    kind = side.kind[use]
                    if queue[kind] == 0.0:
                        queue[kind] = links.latency[kind]
                    queue[kind] += side.inputs[use] * links.seconds[kind]
        done[i], there[i] = seconds, queue.max()
    return done, there


@nb.njit(cache=True)
def _phases(count, first, gap, early, last):
    """The phases of the divisions: consecutive ones, at the end moved to where the latest rows are there."""
    if len(early) == 0 or early[0] > 0 or (count == 1 and last > 0):
        first = 1
    chosen = np.arange(first, first + count)
    if 0 < gap < count:
        chosen[gap:] += 1
    needed = early[-1] if len(early) > 0 else 0
    missing = needed - chosen[-1]
    if missing > 0:
        for i in range(1 if first == 0 else 0, count):
            chosen[i] += missing
    return chosen


@nb.njit(cache=True)
def _cuts(done, there, near, early, phases, most, head):
    """int64[divisions]: where each division ends, so that rows are the least late, then divisions the most even; the last
    one ends early if it can't be done."""
    ends, tried = np.zeros(len(phases), np.int64), np.zeros(len(phases), np.int64)
    if len(done) == 0:
        return ends
    low, high = 0.0, there[-1]
    for i in range(len(done) if phases[0] > 0 else 0):  # what needs no other node belongs into the first division
        if early[i] <= 1 and near[i]:
            low = there[i]
    if not _fits(done, there, early, phases, high, most, head, ends):
        return ends
    if _fits(done, there, early, phases, low, most, head, tried):
        high = low
        ends[:] = tried
    for _ in range(SEARCHES if high > low else 0):
        middle = (low + high) / 2
        if _fits(done, there, early, phases, middle, most, head, tried):
            high = middle
            ends[:] = tried
        else:
            low = middle
    small, large = done[-1] / len(phases), min(most, done[-1])
    for _ in range(SEARCHES):
        middle = (small + large) / 2
        if _fits(done, there, early, phases, high, middle, head, tried):
            large = middle
            ends[:] = tried
        else:
            small = middle
    return ends


@nb.njit(cache=True)
def _fits(done, there, early, phases, late, most, head, ends):
    """Whether divisions of at most ``most`` seconds (the first one: ``head``), which begin at most ``late``, can hold all
    units; their ends."""
    at, before, local = 0, 0.0, np.searchsorted(early, 1)
    for c in range(len(phases)):
        begin = at
        at = min(np.searchsorted(early, phases[c] + 1), max(local, np.searchsorted(there, before + late, side="right")))
        room = min(most, head) if c == 0 else most
        at = max(min(at, max(begin + 1, np.searchsorted(done, before + room, side="right"))), begin)
        at = min(at, len(done))
        before = done[at - 1] if at > 0 else 0.0
        ends[c] = at
    return at == len(done)
