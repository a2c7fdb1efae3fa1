"""Divisions: what may be computed when, and how much at once."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dcp import masks
from hf_dcp.config import DcpConfig
from hf_dcp.planning import BatchSpec, ModelShape, Plan, Topology, plan_batch, schedule, trials
from hf_dcp.planning.divisions import Trial
from hf_dcp.planning.exposure import exposure
from hf_dcp.planning.plan import Message
from hf_dcp.planning.problem import costed_passes
from hf_dcp.planning.simulate import HARDWARE, Rates, item_areas, simulate
from hf_dcp.planning.timeline import make_timeline, predict
from hf_dcp.planning.trials import MORE, TWO, Trials
from tests.planning.solvers import random_solver
from tests.planning.strategies import batches, topologies

WAYS = [Trial(1), *TWO, *(trial._replace(divisions=n) for n in (3, 5) for trial in MORE)]


@pytest.mark.parametrize("trial", WAYS)
def test_every_way_to_cut_is_exact(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are there before they are used, also relayed ones; results reach their owners; divisions are as many as may be."""
    monkeypatch.setattr(schedule._Scheduler, "_without_trials", lambda self: trial)
    for seed, topology in enumerate([Topology.grid(2, 3), Topology((0, 0, 1, 0, 1, 2, 1))]):
        batch = BatchSpec([70, 33], [masks.causal(), masks.full()])
        config = DcpConfig(block_size=6, divisions=trial.divisions, backward_kv=("refetch", "keep")[seed])
        plan = plan_batch(batch, topology, ModelShape(4, 2, 4, "fp32"), config, solver=random_solver(seed))
        plan.check()
        for rank_plan in plan.rank_plans:
            for _, program in rank_plan.windows[0].passes():
                assert len(program.divisions) - 1 <= trial.divisions


@pytest.mark.parametrize(("row_s", "off"), [(0.0, 1e-9), (1e-7, 0.1)])
@settings(max_examples=40, deadline=None)
@given(
    batches(max_length=40, max_sequences=3),
    topologies,
    st.integers(0, 2**31),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["refetch", "keep"]),
)
def test_what_is_predicted_is_what_rank_plans_take(
    row_s: float, off: float, batch: BatchSpec, topology: Topology, seed: int, most: int, backward_kv: str
) -> None:
    """Schedules are judged without making rank plans: by the very seconds that the simulation of rank plans then says, or close
    to them where query rows take time, which are counted by block."""
    rates = Rates(1e9, 1e8, 7e8, 1e-6, 3e-7, launch_s=2e-7, call_s=1e-6, row_s=row_s)
    config = DcpConfig(block_size=5, divisions=most, hardware=rates, backward_kv=backward_kv)
    with chosen_schedules() as chosen:
        plan = plan_batch(batch, topology, ModelShape(4, 2, 4, "fp32"), config, solver=random_solver(seed))
    for which, (made, found) in zip(costed_passes(config), chosen, strict=False):
        line = make_timeline(made.parts[0], made.parts[1], most)
        total = predict(line, *made.parts, found.phase, made.node)
        assert np.array_equal(line.arrive, found.arrive) and np.array_equal(line.leave, found.leave)
        simulated = simulate(plan.rank_plans, which, rates).total_s
        assert abs(total - simulated) <= off * simulated


@contextmanager
def chosen_schedules() -> Iterator[list[tuple[Trials, trials.Schedule]]]:
    """The trials of every pass planned meanwhile, and what they chose."""
    chosen: list[tuple[Trials, trials.Schedule]] = []

    class Noting(Trials):
        def best(self) -> trials.Schedule:
            chosen.append((self, super().best()))
            return chosen[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "Trials", Noting)
        yield chosen


REFERENCE = json.loads((Path(__file__).parents[2] / "benchmarks/data/reference_batches.json").read_text())["batches"]
GRID, SHAPE = Topology.grid(4, 8), ModelShape(8, 2, 128)


def reference_plan(name: str, mask: str, **settings: object) -> Plan:
    return plan_batch(BatchSpec(REFERENCE[name], masks.parse_mask(mask)), GRID, SHAPE, DcpConfig(**settings))


@pytest.mark.parametrize(
    ("name", "mask", "which"),
    [
        ("b_4x32768", "causal", "forward"),
        ("b_4x32768", "causal", "backward"),
        ("b_4x32768", "shared:0.2x4", "backward"),
        ("c_longtail", "lambda:64,4096", "forward"),
        ("c_longtail", "lambda:64,4096", "backward"),
    ],
)
def test_exchanges_hide_where_they_can(name: str, mask: str, which: str) -> None:
    """No more is exposed than can't be covered, or a tenth; and with everything in one division, more is."""
    plan = reference_plan(name, mask)
    found = exposure(plan.rank_plans, which, plan.config.rates)
    assert found.mean_compute_s >= found.mean_exchange_s > 0
    assert found.exposed_s <= found.allowed_s
    one = exposure(reference_plan(name, mask, divisions=1).rank_plans, which, plan.config.rates)
    assert one.exposed_s > found.allowed_s and one.exposed_s > 2 * found.exposed_s


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_a_long_sequence_hides_most_of_what_one_division_exposes(which: str) -> None:
    """Not all that could be covered is: docs/performance-planner.md."""
    found, one = (
        exposure(plan.rank_plans, which, plan.config.rates)
        for plan in (reference_plan("a_1x131072", "causal"), reference_plan("a_1x131072", "causal", divisions=1))
    )
    assert found.exposed_s <= 0.3 * one.exposed_s


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_no_division_of_a_long_sequence_is_large(which: str) -> None:
    for plan in reference_plan("a_1x131072", "causal").rank_plans:
        part = plan.windows[0]
        program = getattr(part, which)
        areas = item_areas(part)[program.order]
        assert len(program.messages)
        assert np.add.reduceat(areas, program.divisions[:-1]).max() <= 0.40 * areas.sum()


def test_without_exchanges_there_is_one_division() -> None:
    for plan in reference_plan("d_64x2048", "causal").rank_plans:
        for _, program in plan.windows[0].passes():
            assert len(program.messages) == 0 and len(program.divisions) == 2


@pytest.mark.parametrize("seed", range(4))
def test_brute_force_finds_little_better_divisions(seed: int) -> None:
    """All ways to put the tiles of two devices into phases, at most two a device, against what is found."""
    rates = Rates(1e9, 3e7, 3e7, 1e-7, 1e-7)
    config = DcpConfig(block_size=8, divisions=2, head_groups=1, hardware=rates)
    batch, topology = BatchSpec([24, 11], masks.causal()), Topology.grid((1, 2)[seed % 2], (2, 1)[seed % 2])
    with chosen_schedules() as chosen:
        plan = plan_batch(batch, topology, ModelShape(2, 1, 8, "fp32"), config, solver=random_solver(seed, stay=0.6))
    found = simulate(plan.rank_plans, "forward", rates).total_s
    made = chosen[0][0]
    units = made.parts[1]
    of_device = [units.front[units.begin[d] : units.begin[d + 1]] for d in (0, 1)]
    best, phase = np.inf, np.zeros(len(units.kind), np.int32)
    for first in in_two_divisions(units.kind[of_device[0]]):
        for second in in_two_divisions(units.kind[of_device[1]]):
            phase[of_device[0]], phase[of_device[1]] = first, second
            best = min(best, predict(made.line, *made.parts, phase, made.node))
    assert best <= found * (1 + 1e-9)
    assert found <= 1.20 * best


def in_two_divisions(kind: np.ndarray) -> np.ndarray:
    """All phases of a device's units with at most two divisions, rows being there: int32[..., units]."""
    ways = [way for pair in itertools.combinations(range(5), 2) for way in itertools.product(pair, repeat=len(kind))]
    return np.unique([way for way in ways if np.all(np.array(way) >= np.minimum(kind, 1))], axis=0).astype(np.int32)


def long_plan(**settings: object):
    config = DcpConfig(block_size=256, **settings)
    return plan_batch(BatchSpec([16384], masks.causal()), Topology.grid(2, 4), ModelShape(8, 2, 128), config)


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_no_division_takes_whatever_remains(which: str) -> None:
    for plan in long_plan().rank_plans:
        part = plan.windows[0]
        program = getattr(part, which)
        areas = item_areas(part)[program.order]
        shares = np.add.reduceat(areas, program.divisions[:-1]) / areas.sum()
        assert len(program.messages)
        assert len(shares) <= 4
        assert shares.max() <= 0.40


def test_division_compute_and_bytes_add_up() -> None:
    plan = long_plan()
    times = simulate(plan.rank_plans, "forward", HARDWARE["a100-efa"])
    assert sum(times.division_share) == pytest.approx(1.0)
    score = plan.score.passes["forward"]
    assert sum(times.division_bytes) == score.inter_node + score.intra_node


def test_more_divisions_hide_more() -> None:
    rates = Rates(device_flops=1e12, inter_bytes=1e10, intra_bytes=1e10, latency_s=0.0)
    one, four = (simulate(long_plan(divisions=t).rank_plans, "forward", rates) for t in (1, 4))
    assert four.total_s < one.total_s
    assert four.compute_s == pytest.approx(one.compute_s)


def test_where_query_rows_take_time_there_are_fewer_divisions() -> None:
    """Each division loads its query rows and merges into them; on a CPU that outweighs exchanges soon."""
    free = Rates(device_flops=1e12, inter_bytes=1e10, intra_bytes=1e10, latency_s=0.0)
    dear = replace(free, row_s=1e-6)
    counts, totals = [], []
    for rates in (free, dear):
        plans = long_plan(hardware=rates).rank_plans
        counts.append(max(len(plan.windows[0].forward.divisions) for plan in plans))
        totals.append(simulate(plans, "forward", dear).total_s)
    assert counts[1] < counts[0]
    assert totals[1] < totals[0]


def test_a_link_of_no_speed_is_waited_for() -> None:
    """Negative control of the cost model: a thousand times slower links can't go unnoticed."""
    slow = Rates(device_flops=1e12, inter_bytes=1e7, intra_bytes=1e7)
    fast = Rates(device_flops=1e12, inter_bytes=1e10, intra_bytes=1e10)
    plans = long_plan().rank_plans
    late, early = simulate(plans, "forward", slow), simulate(plans, "forward", fast)
    assert late.total_s - late.compute_s > 50 * (early.total_s - early.compute_s)
    assert late.exposed_s > 10 * early.exposed_s


def test_messages_are_sorted_and_one_per_peer() -> None:
    for plan in long_plan().rank_plans:
        for _, program in plan.windows[0].passes():
            columns = [Message.EXCHANGE, Message.PARTIAL, Message.INCOMING, Message.PEER]
            keys = [tuple(row) for row in program.messages[:, columns].tolist()]
            assert keys == sorted(set(keys))
