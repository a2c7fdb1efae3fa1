"""Predicted times against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_dcp.config import DcpConfig
from hf_dcp.masks import causal
from hf_dcp.planning import BatchSpec, ModelShape, Topology, plan_batch
from hf_dcp.planning.simulate import Rates, simulate

SHAPE = ModelShape(heads=4, kv_heads=2, head_dim=16)
RATES = Rates(1e9, 1e6, 1e6, latency_s=0.0, intra_latency_s=0.0)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("which", "flops", "rows"), [("forward", 1.0, 1.0), ("backward", 2.5, 1.5)])
def test_one_rank_takes_its_overheads_and_arithmetic(which: str, flops: float, rows: float, groups: int) -> None:
    """Every query row counts once for all heads, though it meets several blocks of KV, once for each head group."""
    lengths = (300, 77)
    config = DcpConfig(block_size=32, head_groups=groups)
    plans = plan_batch(BatchSpec(lengths, causal()), Topology((0,)), SHAPE, config).rank_plans
    work = flops * 4 * 16 * 4 * sum(n * (n + 1) / 2 for n in lengths) / 1e9
    assert simulate(plans, which, RATES).total_s == pytest.approx(work)
    slow = replace(RATES, launch_s=0.5, call_s=2.0, row_s=1e-3)
    assert simulate(plans, which, slow).total_s == pytest.approx(work + 2.5 + rows * sum(lengths) * 1e-3)
