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
max(0, F + R - L): `hf_dcp.planning.exposure`.
"""

from __future__ import annotations

from typing import NamedTuple

import numba as nb
import numpy as np

from hf_dcp.planning.links import Links
from hf_dcp.planning.transfers import BETWEEN, INSIDE, RELAYED, Transfers
from hf_dcp.planning.units import Units

LARGEST_SHARE = 0.38
"""No division holds more of a device's compute, if there are at least three."""
FULL = 0.98
"""Late divisions are filled to this share of the largest, so that relayed rows have as much time as can be had."""
SEARCHES = 6
"""Steps of a bisection."""


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
def assign_phases(transfers: Transfers, units: Units, links: Links, trial: Trial) -> np.ndarray:
    """The phase of every unit: int32[units]."""
    phase = np.zeros(len(units.kind), np.int32)
    for device in range(len(units.begin) - 1):
        assign_device(transfers, units, links, trial, device, phase)
    return phase


@nb.njit(cache=True)
def assign_device(transfers, units, links, trial, device, phase):
    """Write the phases of one device's units to ``phase``."""
    own = slice(units.begin[device], units.begin[device + 1])
    front, back = units.front[own], units.back[own].copy()
    if len(front) == 0:
        return
    seconds, kind = units.seconds, units.kind
    total, last = 0.0, np.int64(0)  # a literal 0 would be one more type to compile for
    for u in front:
        phase[u] = 0
        total += seconds[u]
        last = max(last, _earliest(kind[u]))
    kept = _kept(units, back, trial.local, trial.kept) if trial.divisions > 1 else 0
    for i in range(kept):
        phase[back[i]] = -1
    order = np.empty(len(front) - kept, np.int64)
    count = 0
    for u in front:
        if phase[u] == 0:
            order[count] = u
            count += 1
    latest = _cut_device(transfers, units, links, trial, order, total, trial.divisions - (kept > 0), last, phase)
    for i in range(kept):
        phase[back[i]] = max(latest + 1 + trial.gap_behind, last)


@nb.njit(cache=True)
def _earliest(kind):
    """The phase in which rows can be there at best."""
    return kind - (kind >= BETWEEN)


@nb.njit(cache=True)
def _kept(units, back, local_share, kept_share):
    """Rearrange ``back`` so that what is kept for the last division comes first, and count it."""
    seconds, kind = units.seconds, units.kind
    total, local = 0.0, 0.0
    for u in back:
        total += seconds[u]
        if kind[u] == 0:
            local += seconds[u]
    if total == local:
        return 0
    kept = 0
    room = np.array([local_share * local, kept_share * total])
    for i in range(len(back)):
        u = back[i]
        which = 0 if kind[u] == 0 else 1
        if seconds[u] / 2 <= room[which]:
            room[which] -= seconds[u]
            back[i], back[kept] = back[kept], u
            kept += 1
    return kept


@nb.njit(cache=True)
def _cut_device(transfers, units, links, trial, order, total, divisions, last, phase):
    """Cut the units of a device, in this order, into divisions; returns the phase of the last one."""
    count, kind, seconds = len(order), units.kind, units.seconds
    done, there = _prefixes(transfers, units, links, order)
    most = LARGEST_SHARE * total if trial.divisions > 2 else np.inf
    early, near = np.empty(count, np.int64), np.empty(count, np.bool_)
    for i in range(count):
        early[i], near[i] = _earliest(kind[order[i]]), kind[order[i]] <= INSIDE
    phases = _phases(divisions, trial.first, trial.gap, early, last)
    patient, room = early.copy(), 0.0
    later = phases[trial.gap] if 0 < trial.gap < len(phases) else np.int64(RELAYED)
    for i in range(count - 1, -1, -1):  # what comes last is given a phase more, in which its gateway receives it
        room += seconds[order[i]]
        if kind[order[i]] == RELAYED:
            patient[i] = later if room <= most * FULL * (phases >= later).sum() else early[i]
    head = trial.head * units.mean
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
    return latest


@nb.njit(cache=True)
def _prefixes(transfers, units, links, order):
    """(Compute seconds, when the rows are there at best) of the first 1, 2, ... units."""
    ptr, uses, kinds, inputs = transfers.unit_ptr, transfers.unit_use, transfers.kind, transfers.inputs
    seconds, per_byte, latency = units.seconds, links.seconds, links.latency
    done, there = np.empty(len(order)), np.empty(len(order))
    seen = np.zeros(len(kinds), np.bool_)
    total, latest, queue = 0.0, 0.0, np.zeros(4)
    for i in range(len(order)):
        total += seconds[order[i]]
        for p in range(ptr[order[i]], ptr[order[i] + 1]):
            use = uses[p]
            if not seen[use]:
                seen[use] = True
                kind = kinds[use]
                if queue[kind] == 0.0:
                    queue[kind] = latency[kind]
                queue[kind] += inputs[use] * per_byte[kind]
                latest = max(latest, queue[kind])
        done[i], there[i] = total, latest
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
