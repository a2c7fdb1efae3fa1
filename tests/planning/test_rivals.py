"""What static schemes cost, told from the rows that their chunks read, is what scoring their tiles says."""

from __future__ import annotations

import pytest

from hf_dcp.config import DcpConfig
from hf_dcp.masks import parse_mask
from hf_dcp.planning import BatchSpec, ModelShape, Topology
from hf_dcp.planning.placement.portfolio import solve
from hf_dcp.planning.placement.rivals import RIVALS, promising_rivals

SHAPE = ModelShape(8, 2, 64, windows=((None, 1), (200, 3)))
MASKS = ("causal", "full", "lambda:64,1024", "blockwise:256,2,1,1", "shared:0.2x4", "window:300")


@pytest.mark.parametrize("topology", [Topology.grid(2, 4), Topology((0, 0, 1, 1, 1)), Topology((0, 1, 0, 1))])
@pytest.mark.parametrize("lengths", [[5000, 3000, 777, 64, 5], [333, 333, 333, 4000]])
def test_cost_and_balance_are_those_of_the_tiles(lengths: list[int], topology: Topology) -> None:
    def promising(cost: int, epsilon: float) -> list[str]:
        return promising_rivals(batch, topology, SHAPE, DcpConfig(epsilon=epsilon), cost)

    for mask in MASKS:
        batch = BatchSpec(lengths, parse_mask(mask))
        for name in RIVALS:
            if name == "head-ring" and topology.world_size % 2:
                continue
            score = solve(batch, topology, SHAPE, DcpConfig(placement=name)).score
            uneven = score.compute_imbalance - 1
            assert name in promising(score.cost + 1, 1.001 * uneven + 1e-6)
            assert name not in promising(score.cost, 50.0)
            assert name not in promising(score.cost + 1, 0.99 * uneven) or uneven < 1e-6


def test_many_chunks_are_no_excuse() -> None:
    """A plan is not worse than a static one that would have more tiles than a search may have."""
    batch, topology = BatchSpec([4096] * 3 + [4095] * 3, parse_mask("window:64")), Topology.grid(4, 8)
    found = solve(batch, topology, ModelShape(8, 2, 64), DcpConfig()).score
    ring = solve(batch, topology, ModelShape(8, 2, 64), DcpConfig(placement="ring")).score
    assert found.excess == 0 and found.key <= ring.key
