"""``epsilon="auto"``: few bytes or even compute, by predicted time."""

from __future__ import annotations

import pytest

from hf_dcp import masks
from hf_dcp.config import DcpConfig
from hf_dcp.planning import BatchSpec, ModelShape, Plan, Topology, plan_batch
from hf_dcp.planning.planner import EPSILONS, predicted_seconds
from hf_dcp.rates import Rates

COMPUTE_BOUND = Rates(device_flops=3e10, inter_bytes=1e9, intra_bytes=1e9)
LINK_BOUND = Rates(device_flops=3e14, inter_bytes=1e7, intra_bytes=1e7)


LENGTHS = [1040, 1000, 1000, 980]
"""Whole sequences keep 0.10 and send nothing; 0.02 wants them cut."""


def planned(epsilon: float | str, rates: Rates) -> Plan:
    shape = ModelShape(8, 2, 64, "fp32", windows=((None, 2), (512, 1)))
    config = DcpConfig(epsilon=epsilon, hardware=rates)
    return plan_batch(BatchSpec(LENGTHS, masks.causal()), Topology.grid(2, 2), shape, config)


@pytest.mark.parametrize(("rates", "chosen"), [(COMPUTE_BOUND, 0.02), (LINK_BOUND, 0.10)])
def test_the_faster_of_both_is_taken(rates: Rates, chosen: float) -> None:
    auto, fixed = planned("auto", rates), {epsilon: planned(epsilon, rates) for epsilon in EPSILONS}
    seconds = {epsilon: predicted_seconds(plan) for epsilon, plan in fixed.items()}
    assert seconds[chosen] < max(seconds.values())
    assert auto.digest == fixed[chosen].digest
    assert auto.config.epsilon == chosen
    assert auto.score.compute_imbalance <= 1 + chosen + 1e-9
    assert predicted_seconds(auto) == min(seconds.values())


def test_the_choice_is_made_by_plan_batch_alone() -> None:
    from hf_dcp.planning.limits import compute_tolerance

    with pytest.raises(ValueError, match="write a number"):
        compute_tolerance(DcpConfig(epsilon="auto"))


@pytest.mark.parametrize("value", ["wide", -0.1, True])
def test_other_words_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match='epsilon must be a number of at least 0, such as 0.1, or "auto"'):
        DcpConfig(epsilon=value)
