"""Which ways to cut divisions are tried, and which one is taken."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hf_dcp.planning.adjust import adjust
from hf_dcp.planning.divisions import Trial, assign_phases
from hf_dcp.planning.links import Links
from hf_dcp.planning.timeline import exchange_numbers, make_timeline, predict
from hf_dcp.planning.transfers import RELAYED, Transfers
from hf_dcp.planning.units import Units

TWO = (Trial(2), Trial(2, local=0.5))
"""How two divisions are cut."""
MORE = (
    Trial(3),
    Trial(3, local=0.3),
    Trial(3, local=0.5),
    Trial(3, first=1, kept=0.12, gap_behind=1),
    Trial(3, first=1, local=0.3, kept=0.2, gap_behind=1),
    Trial(3, first=1, gap=1, local=0.5, kept=0.12, head=0.17, gap_behind=1),
    Trial(3, first=1, gap=1, local=0.5, kept=0.15, head=0.2, gap_behind=1),
    Trial(3, first=1, gap=2),
    Trial(3, first=1, gap=2, local=0.3),
    Trial(3, gap=2),
    Trial(3, gap=2, local=0.3, kept=0.12, gap_behind=1),
)
"""How three are, and more: ways that leave little exposed between them. They were found among some 800 by 142 passes of the
batches of reference and of 15 data sets; the two with a ``head`` by 92 passes with relayed rows, their shares by the batch of
one sequence alone. What a way for a single device could still add is found by `adjust`."""
FEWER = 2
"""So many of the best are also tried with fewer divisions."""
CLOSE = 1.02
"""Fewer divisions are taken if they lose at most so many times what the best lose."""
TRIES, PAIRS = 400, 1024
"""So many ways of single devices are tried, to improve the best of all; fewer if there are more pairs of devices than this."""


class Schedule(NamedTuple):
    """The divisions and exchanges of one pass on all devices."""

    phase: np.ndarray
    """int32[units]"""
    arrive: np.ndarray
    """int64[uses]: in which exchange rows arrive."""
    leave: np.ndarray
    """int64[uses]: in which their partial results leave."""


class _Tried(NamedTuple):
    trial: Trial
    phase: np.ndarray
    seconds: float
    """Predicted, until the last rank is done."""


def schedule_by(trial: Trial, transfers: Transfers, units: Units, links: Links) -> Schedule:
    """The schedule of one trial."""
    phase = assign_phases(transfers, units, links, trial)
    return Schedule(phase, *exchange_numbers(transfers, phase))


class Trials:
    """Schedules of one pass, compared by predicted time.

    Args:
        node: int32[world_size]
        divisions: the most that there may be.
        seed: of what is tried with single devices.
    """

    def __init__(
        self, transfers: Transfers, units: Units, links: Links, node: np.ndarray, divisions: int, seed: int
    ) -> None:
        self.parts = (transfers, units, links)
        self.node, self.divisions, self.seed = node, divisions, seed
        self.line = make_timeline(transfers, units, divisions)
        self.relayed = bool(np.any(transfers.kind == RELAYED))
        self.busiest = max(float(units.seconds[units.front[a:b]].sum()) for a, b in pairwise(units.begin))

    def best(self) -> Schedule:
        """Of the schedules with the fewest divisions that lose at most `CLOSE` more than the best to anything but compute, the
        best."""
        most = self.divisions
        found = [self._try(Trial(1))] + [self._try(trial) for trial in TWO if most >= 2]
        if most >= 3:
            ways = [trial for trial in MORE if self.relayed or not trial.gap]
            full = sorted((self._try(trial._replace(divisions=most)) for trial in ways), key=lambda one: one.seconds)
            found += full + [self._try(one.trial._replace(divisions=n)) for n in range(3, most) for one in full[:FEWER]]
        least = min(found, key=lambda one: (one.seconds, one.trial.divisions))
        if most >= 2 and least.seconds > self.busiest * (1 + 1e-12):
            found.append(self._adjusted(least))
        least_s = min(one.seconds for one in found)
        limit = least_s * (1 + 1e-12) + (CLOSE - 1) * max(least_s - self.busiest, 0.0)
        fewest = min(one.trial.divisions for one in found if one.seconds <= limit)
        chosen = min((one for one in found if one.trial.divisions == fewest), key=lambda one: one.seconds)
        return Schedule(chosen.phase, *exchange_numbers(self.parts[0], chosen.phase))

    def _try(self, trial: Trial) -> _Tried:
        phase = assign_phases(*self.parts, trial)
        return _Tried(trial, phase, predict(self.line, *self.parts, phase, self.node))

    def _adjusted(self, one: _Tried) -> _Tried:
        """The same with devices that have ways of their own."""
        phase, pairs = one.phase.copy(), len(self.node) ** 2
        tries = TRIES * PAIRS // max(PAIRS, pairs)
        predict(self.line, *self.parts, phase, self.node)
        seconds = adjust(self.line, *self.parts, phase, self.node, one.trial.divisions, tries, self.seed)
        return _Tried(one.trial, phase, seconds)
