"""Which ways to cut divisions are tried, and which one is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hf_dcp.planning.divisions import Trial

TWO = (Trial(2), Trial(2, local=0.5))
"""How two divisions are cut."""
MORE = (
    Trial(3),
    Trial(3, local=0.3),
    Trial(3, local=0.5),
    Trial(3, kept=0.2),
    Trial(3, first=1),
    Trial(3, first=1, kept=0.12, gap_behind=1),
    Trial(3, first=1, local=0.3, kept=0.2, gap_behind=1),
    Trial(3, first=1, gap=1, local=0.5, kept=0.12, gap_behind=1),
    Trial(3, first=1, gap=1, local=0.5, kept=0.12, head=0.17, gap_behind=1),
    Trial(3, first=1, gap=1, local=0.5, kept=0.15, head=0.2, gap_behind=1),
    Trial(3, first=1, gap=1, kept=0.18, head=0.14, gap_behind=1),
    Trial(3, first=1, gap=2),
    Trial(3, first=1, gap=2, local=0.3),
    Trial(3, gap=1, local=0.5, gap_behind=1),
    Trial(3, gap=2),
    Trial(3, gap=2, local=0.3, kept=0.12, gap_behind=1),
)
"""How three are, and more. Out of some 800 ways these leave the least exposed between them, with four divisions at most, on
average over 142 passes: of the batches of reference, and of 15 data sets. Those with a ``head`` came later: by 92 passes
with relayed rows, and two of their shares by the batch of one sequence alone."""
FEWER = 2
"""So many of the best are also tried with fewer divisions."""
CLOSE = 1.02
"""Fewer divisions are taken if they lose at most so many times what the best lose."""

Numbers = tuple[np.ndarray, np.ndarray]
"""In which exchange the rows of every use arrive, and in which their partial results leave."""


class Schedule(NamedTuple):
    """The divisions and exchanges of one pass on all devices."""

    trial: Trial
    phase: np.ndarray
    """int32[units]"""
    numbers: tuple[Numbers, Numbers]
    """Of Q rows, and of KV rows."""
    seconds: float
    """Predicted, until the last rank is done; 0 where nothing is compared."""


def choose(make: Callable[[Trial], Schedule], divisions: int, relayed: bool, busiest: float) -> Schedule:
    """Of the trials with the fewest divisions that lose at most `CLOSE` more than the best to anything but compute, the best.

    Args:
        divisions: the most that there may be.
        relayed: whether any rows go through gateways.
        busiest: seconds that the busiest device computes.
    """
    found = [make(Trial(1))] + [make(trial) for trial in TWO if divisions >= 2]
    if divisions >= 3:
        tried = [trial for trial in MORE if relayed or not trial.gap]
        full = sorted((make(trial._replace(divisions=divisions)) for trial in tried), key=lambda one: one.seconds)
        found += full + [make(one.trial._replace(divisions=n)) for n in range(3, divisions) for one in full[:FEWER]]
    best = min(one.seconds for one in found)
    most = best * (1 + 1e-12) + (CLOSE - 1) * max(best - busiest, 0.0)
    fewest = min(one.trial.divisions for one in found if one.seconds <= most)
    return min((one for one in found if one.trial.divisions == fewest), key=lambda one: one.seconds)
