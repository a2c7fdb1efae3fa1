"""Divisions against those that a long search finds: how much of what is exposed could be hidden at all."""

from __future__ import annotations

import numpy as np
import pytest

from hf_dcp.planning import schedule
from hf_dcp.planning.divisions import make_units
from hf_dcp.planning.timeline import exchange_numbers, predict
from hf_dcp.planning.trials import choose
from tests.planning.test_divisions import reference_plan

MOVES, DIVISIONS, LATEST = 20_000, 4, 7


class Pass:
    """What `predict` wants of one pass, noted while a plan is made."""

    def __init__(self, name: str, mask: str, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[tuple] = []
        chosen: list = []
        units: list[tuple] = []
        for where, kept, function in (
            ("predict", calls, predict),
            ("choose", chosen, choose),
            ("make_units", units, make_units),
        ):
            monkeypatch.setattr(schedule, where, _noting(function, kept))
        reference_plan(name, mask)
        number = ("forward", "backward").index(which)
        self.found = chosen[number][1]
        self.units = units[number][1]
        arguments = next(a for a, _ in calls if a[0] is units[number][0][2][0])
        self.q, self.kv, _, self.device, _, self.work, self.node, self.links = arguments
        self.blocks = units[number][0][3]
        load = np.bincount(self.device.ravel(), weights=np.repeat(self.work.seconds, self.device.shape[1]))
        self.busiest = load.max()

    def exposed(self, phase: np.ndarray) -> float:
        numbers = tuple(exchange_numbers(side, self.device, phase) for side in (self.q, self.kv))
        rest = self.device, phase, self.work, self.node, self.links
        return predict(self.q, self.kv, numbers, *rest) - self.busiest


def _noting(function, kept: list):
    def noted(*arguments):
        result = function(*arguments)
        kept.append((arguments, result))
        return result

    return noted


def anneal(one: Pass, seed: int) -> float:
    """The least exposed exchange that random moves of tiles find: those of a device that share a block, to another phase."""
    rng, groups = np.random.default_rng(seed), one.device.shape[1]
    device, earliest = one.device.ravel(), np.minimum(one.units.kind, 1) + (one.units.kind == 3)
    places = [np.c_[device, np.repeat(block, groups), np.tile(np.arange(groups), len(block))] for block in one.blocks]
    bundles = []
    for place in places:
        _, which = np.unique(place, axis=0, return_inverse=True)
        order = np.argsort(which.ravel(), kind="stable")
        bundles += np.split(order, np.flatnonzero(np.diff(which.ravel()[order])) + 1)
    phase = one.found.phase.copy()
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mask", "which", "more"),
    [
        ("a_1x131072", "causal", "backward", 1.2),
        ("a_1x131072", "lambda:64,4096", "backward", 1.15),
        ("a_1x131072", "shared:0.2x4", "backward", 2.0),
        ("c_longtail", "causal", "forward", 1.15),
        ("c_longtail", "shared:0.2x4", "backward", 1.15),
    ],
)
def test_a_long_search_hides_little_more(
    name: str, mask: str, which: str, more: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What these passes expose is due to their placement and to four divisions, not to how divisions are cut, but for one."""
    one = Pass(name, mask, which, monkeypatch)
    found = one.exposed(one.found.phase)
    best = min(anneal(one, seed) for seed in range(2))
    print(f"{name} {mask} {which}: {found * 1e3:.3f} ms exposed, {best * 1e3:.3f} ms after a long search")
    assert 0 < best <= found <= more * best
