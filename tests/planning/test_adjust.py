"""Devices with ways of their own: never worse, still legal, and counted right while they change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dcp import masks
from hf_dcp.config import DcpConfig
from hf_dcp.planning import BatchSpec, ModelShape, Topology, plan_batch, trials
from hf_dcp.planning.adjust import adjust
from hf_dcp.planning.divisions import Trial
from hf_dcp.planning.simulate import Rates
from hf_dcp.planning.timeline import exchange_numbers, make_timeline, predict
from tests.planning.solvers import random_solver
from tests.planning.strategies import batches, topologies
from tests.planning.test_divisions import chosen_schedules, reference_plan


@pytest.mark.parametrize("row_s", [0.0, 1e-7])
@settings(max_examples=40, deadline=None)
@given(batches(max_length=40, max_sequences=3), topologies, st.integers(0, 2**31), st.sampled_from([2, 3, 4]))
def test_what_is_kept_up_to_date_is_what_counting_anew_says(
    row_s: float, batch: BatchSpec, topology: Topology, seed: int, most: int
) -> None:
    rates = Rates(1e9, 1e8, 7e8, 1e-6, 3e-7, launch_s=2e-7, call_s=1e-6, row_s=row_s)
    config = DcpConfig(block_size=5, divisions=most, hardware=rates)
    with chosen_schedules() as chosen:
        plan_batch(batch, topology, ModelShape(4, 2, 4, "fp32"), config, solver=random_solver(seed))
    for made, _ in chosen:
        transfers, units, _ = made.parts
        phase = trials.schedule_by(Trial(most, first=1), *made.parts).phase
        line, anew = (make_timeline(transfers, units, most) for _ in range(2))
        before = predict(line, *made.parts, phase, made.node)
        after = adjust(line, *made.parts, phase, made.node, most, 60, seed)
        assert after <= before
        assert predict(anew, *made.parts, phase, made.node) == pytest.approx(after, rel=1e-12)
        for kept, counted in zip(line[:8], anew[:8], strict=True):
            assert np.array_equal(kept, counted)
        numbers = exchange_numbers(transfers, phase)
        assert np.array_equal(line.arrive, numbers[0]) and np.array_equal(line.leave, numbers[1])
        for begin, end in zip(units.begin[:-1], units.begin[1:], strict=True):
            assert len(np.unique(phase[units.front[begin:end]])) <= most
        assert np.all(phase >= np.minimum(units.kind, 1))


def test_adjusted_plans_are_exact() -> None:
    """Rows are there before they are used when devices cut their divisions differently; negative control: some do."""
    ways = 0
    for seed, topology in enumerate([Topology.grid(2, 3), Topology((0, 0, 1, 0, 1, 2, 1))]):
        batch = BatchSpec([70, 33], [masks.causal(), masks.full()])
        config = DcpConfig(block_size=6, hardware=Rates(1e8, 1e8, 7e8, 1e-6, 3e-7))
        with chosen_schedules() as chosen:
            plan = plan_batch(batch, topology, ModelShape(4, 2, 4, "fp32"), config, solver=random_solver(seed))
        plan.check()
        for made, found in chosen:
            same = [
                trials.schedule_by(way._replace(divisions=n), *made.parts)
                for n in (2, 3, 4)
                for way in (Trial(1), *trials.TWO, *trials.MORE)
            ]
            ways += not any(np.array_equal(found.phase, one.phase) for one in same)
    assert ways


@pytest.mark.parametrize(
    ("mask", "which", "share"), [("causal", 0, 0.7), ("shared:0.2x4", 0, 0.7), ("shared:0.2x4", 1, 0.95)]
)
def test_a_long_sequence_exposes_less(mask: str, which: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    exposed = []
    for tries in (0, trials.TRIES):
        monkeypatch.setattr(trials, "TRIES", tries)
        with chosen_schedules() as chosen:
            reference_plan("a_1x131072", mask)
        made, found = chosen[which]
        exposed.append(predict(made.line, *made.parts, found.phase, made.node) - made.busiest)
    assert 0 < exposed[1] <= share * exposed[0]
