"""Divisions against those that a long search finds: how much of what is exposed could be hidden at all."""

from __future__ import annotations

import numpy as np
import pytest

from hf_dcp.planning.adjust import adjust
from hf_dcp.planning.timeline import make_timeline, predict
from hf_dcp.planning.trials import Schedule, Trials
from tests.planning.test_divisions import chosen_schedules, reference_plan

MOVES, DIVISIONS, LATEST, TRIES = 20_000, 4, 7, 10_000


class Pass:
    """One pass of a batch of reference, and its schedule."""

    def __init__(self, name: str, mask: str, which: str) -> None:
        with chosen_schedules() as chosen:
            reference_plan(name, mask)
        self.trials: Trials
        self.found: Schedule
        self.trials, self.found = chosen[("forward", "backward").index(which)]
        transfers, units, _ = self.trials.parts
        self.line = make_timeline(transfers, units, LATEST)

    def exposed(self, phase: np.ndarray) -> float:
        return predict(self.line, *self.trials.parts, phase, self.trials.node) - self.trials.busiest


def move_tiles(one: Pass, seed: int) -> float:
    """The least exposed exchange that random moves of tiles find: those of a device that use a remote row, or a Q block's,
    to another phase."""
    rng, phase = np.random.default_rng(seed), one.found.phase.copy()
    transfers, units, _ = one.trials.parts
    unit = np.repeat(np.arange(len(units.kind)), np.diff(transfers.unit_ptr))
    device = np.empty(len(units.kind), np.int64)
    device[units.front] = np.repeat(np.arange(len(units.begin) - 1), np.diff(units.begin))
    bundles = []
    for member, key in (
        (unit, transfers.unit_use),
        (units.front, (device * (units.block.max() + 1) + units.block)[units.front]),
    ):
        order = np.argsort(key, kind="stable")
        bundles += np.split(member[order], np.flatnonzero(np.diff(key[order])) + 1)
    earliest = np.minimum(units.kind, 1) + (units.kind == 3)
    now = best = one.exposed(phase)
    for move in range(MOVES):
        bundle, to = bundles[rng.integers(len(bundles))], rng.integers(LATEST + 1)
        moved = bundle[earliest[bundle] <= to]
        before = phase[moved]
        phase[moved] = to
        legal = len(np.unique(phase[device == device[bundle[0]]])) <= DIVISIONS
        then = one.exposed(phase) if legal else np.inf
        if then <= now or rng.random() < np.exp((now - then) / (0.02 * best * (1 - move / MOVES) + 1e-12)):
            now = then
            best = min(best, now)
        else:
            phase[moved] = before
    return best


def adjust_longer(one: Pass, seed: int) -> float:
    """The least exposed exchange after many more ways of single devices than planning tries."""
    phase = one.found.phase.copy()
    one.exposed(phase)
    total = adjust(one.line, *one.trials.parts, phase, one.trials.node, DIVISIONS, TRIES, seed)
    assert one.exposed(phase) == pytest.approx(total - one.trials.busiest)
    return total - one.trials.busiest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mask", "which", "more", "longer"),
    [
        ("a_1x131072", "causal", "backward", 1.2, 1.2),
        ("a_1x131072", "lambda:64,4096", "backward", 1.15, 1.15),
        ("a_1x131072", "shared:0.2x4", "backward", 2.0, 2.4),
        ("c_longtail", "causal", "forward", 1.15, 1.15),
        ("c_longtail", "shared:0.2x4", "backward", 1.15, 1.15),
    ],
)
def test_a_long_search_hides_little_more(name: str, mask: str, which: str, more: float, longer: float) -> None:
    """What windows and short sequences expose is due to their placement and to four divisions, not to how these are cut; of a
    single long sequence a search of seconds hides more."""
    one = Pass(name, mask, which)
    found = one.exposed(one.found.phase)
    moved, adjusted = (min(search(one, seed) for seed in range(2)) for search in (move_tiles, adjust_longer))
    print(
        f"{name} {mask} {which}: {found * 1e3:.3f} ms exposed, {moved * 1e3:.3f} after moving tiles, {adjusted * 1e3:.3f}"
    )
    assert 0 < moved <= found <= more * moved
    assert 0 < adjusted <= found <= longer * adjusted
