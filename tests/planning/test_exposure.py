"""What of exchanges can't be covered, and whom it counts for."""

from __future__ import annotations

import numpy as np
import pytest

from hf_dcp import masks
from hf_dcp.config import DcpConfig
from hf_dcp.planning import BatchSpec, ModelShape, Topology, plan_batch
from hf_dcp.planning.exposure import Exposure, exposure
from hf_dcp.planning.placement import Placement
from hf_dcp.planning.simulate import Rates

RATES = Rates(device_flops=1e9, inter_bytes=1e9, intra_bytes=1e9, latency_s=1e-5, intra_latency_s=1e-5)


def last_block_on_device_1(problem, config) -> Placement:
    block = np.zeros(len(problem.blocks), np.int32)
    block[-1] = 1
    return Placement(
        "last", block, tuple(np.repeat(block[t.q][:, None], problem.head_groups, 1) for t in problem.tiles)
    )


def found(lengths: list[int], which: str) -> Exposure:
    config = DcpConfig(block_size=4, hardware=RATES)
    plan = plan_batch(
        BatchSpec(lengths, masks.causal()),
        Topology.grid(1, 2),
        ModelShape(4, 2, 4, "fp32"),
        config,
        solver=last_block_on_device_1,
    )
    return exposure(plan.rank_plans, which, RATES)


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_a_device_in_no_hurry_leaves_nothing_uncovered(which: str) -> None:
    """Device 1 waits for the rows of its only tiles; that counts where it is late by it, not beside a busy device 0."""
    late, patient = found([8], which), found([400, 8], which)
    assert late.exchange_s == patient.exchange_s > 0
    assert 0 < late.uncoverable_s == pytest.approx(late.exposed_s)  # all of it
    assert patient.compute_s > 10 * patient.exchange_s and patient.uncoverable_s == 0
    assert patient.exposed_s < late.exposed_s
