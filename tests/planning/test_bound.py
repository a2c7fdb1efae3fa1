"""Lower bounds: below every placement, and not empty where a long sequence must be shared."""

from __future__ import annotations

import pytest

from hf_dcp import masks
from hf_dcp.config import DcpConfig
from hf_dcp.planning import BatchSpec, ModelShape, Topology, plan_batch
from hf_dcp.planning.bound import forward_bounds

BATCHES = [
    BatchSpec([8192], masks.causal()),
    BatchSpec([8192], masks.full()),
    BatchSpec([3000, 500, 500, 40], masks.causal()),
    BatchSpec([4096], masks.parse_mask("shared:0.2x4")),
]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: str(batch.lengths))
@pytest.mark.parametrize("topology", [Topology.grid(2, 4), Topology.grid(4, 1), Topology((0, 0, 1))], ids=str)
def test_no_placement_goes_below_its_bound(batch: BatchSpec, topology: Topology) -> None:
    for placement in ("auto", "ring", "zigzag"):
        plan = plan_batch(batch, topology, ModelShape(8, 2, 64), DcpConfig(placement=placement))
        if plan.score.excess:
            continue  # bounds are for placements within the limits
        inter, total = forward_bounds(plan)
        sent = plan.score.passes["forward"]
        assert 0 <= inter <= sent.inter_node
        assert inter <= total <= sent.inter_node + sent.intra_node


def test_a_dense_sequence_has_a_bound_worth_its_name() -> None:
    plan = plan_batch(BatchSpec([8192], masks.causal()), Topology.grid(1, 8), ModelShape(8, 2, 64))
    total = plan.score.passes["forward"].intra_node
    assert forward_bounds(plan)[1] > 0.3 * total
