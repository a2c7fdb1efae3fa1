"""Divisions: what may be computed when, and how much at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dcp import masks
from hf_dcp.config import DcpConfig
from hf_dcp.planning import BatchSpec, ModelShape, Topology, plan_batch
from hf_dcp.planning.divisions import assign_phases
from hf_dcp.planning.plan import Message
from hf_dcp.planning.simulate import HARDWARE, Rates, item_areas, simulate


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 4), st.integers(0, 40))
def test_nothing_is_computed_before_its_rows_arrive(seed: int, divisions: int, world: int, units: int) -> None:
    rng = np.random.default_rng(seed)
    device = rng.integers(0, world, units).astype(np.int32)
    compute = rng.integers(1, 1000, units)
    earliest = rng.integers(0, 3, units).astype(np.int8)
    returns = (earliest > 0) & (rng.random(units) < 0.5)
    phase = assign_phases(device, compute, earliest, returns, rng.integers(0, 5, units), divisions, world)
    assert np.all(phase >= earliest)
    for d in range(world):
        assert len(np.unique(phase[device == d])) <= divisions


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


def test_a_link_of_no_speed_is_waited_for() -> None:
    """Negative control of the cost model: a thousand times slower links can't go unnoticed."""
    slow = Rates(device_flops=1e12, inter_bytes=1e7, intra_bytes=1e7)
    fast = Rates(device_flops=1e12, inter_bytes=1e10, intra_bytes=1e10)
    plans = long_plan().rank_plans
    late, early = simulate(plans, "forward", slow), simulate(plans, "forward", fast)
    # What links add to the busiest device's compute; `exposed_s` counts waiting for slower devices' compute, too.
    assert late.total_s - late.compute_s > 50 * (early.total_s - early.compute_s)
    assert late.exposed_s > 10 * early.exposed_s


def test_messages_are_sorted_and_one_per_peer() -> None:
    for plan in long_plan().rank_plans:
        for _, program in plan.windows[0].passes():
            columns = [Message.EXCHANGE, Message.PARTIAL, Message.INCOMING, Message.PEER]
            keys = [tuple(row) for row in program.messages[:, columns].tolist()]
            assert keys == sorted(set(keys))
