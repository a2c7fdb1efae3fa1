"""Outcomes of a batch against the plans themselves, and against arithmetic by hand."""

from __future__ import annotations

import numpy as np
import pytest

from hf_dcp.config import DcpConfig
from hf_dcp.estimate.schemes import DCP, Outcome, Setting, evaluate, outcomes
from hf_dcp.masks import parse_mask
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.planner import plan_batch
from hf_dcp.planning.simulate import Rates, simulate

SHAPE = ModelShape(heads=4, kv_heads=2, head_dim=16, windows=((None, 2), (64, 3)))
RATES = Rates(1e9, 1e6, 4e6)
LENGTHS = (500, 130, 77)
ALL = {DCP, "ring", "zigzag", "head-ring", "loongtrain", "ring row-exact", "zigzag row-exact", "head-ring row-exact"}


def setting(nodes: int = 2, devices: int = 2, shape: ModelShape = SHAPE, **config: object) -> Setting:
    return Setting(Topology.grid(nodes, devices), shape, DcpConfig(**config), RATES, flops_per_token=1000)


def run(mask: str = "causal", lengths: tuple[int, ...] = LENGTHS, **options: object) -> dict[str, Outcome]:
    return outcomes(BatchSpec(lengths, parse_mask(mask)), setting(**options))


def test_dcp_is_what_its_plan_says() -> None:
    for keep in ("refetch", "keep"):
        found = run(backward_kv=keep)[DCP]
        plan = plan_batch(
            BatchSpec(LENGTHS, parse_mask("causal")), Topology.grid(2, 2), SHAPE, DcpConfig(backward_kv=keep)
        )
        backward = "backward" if keep == "refetch" else "backward_keep"
        passes = [plan.score.passes[which] for which in ("forward", backward)]
        assert found.inter_bytes == sum(one.inter_node for one in passes)
        assert found.intra_bytes == sum(one.intra_node for one in passes)
        seconds = sum(
            layers * simulate(plan.rank_plans, which, RATES, window).total_s
            for window, layers in SHAPE.windows
            for which in ("forward", backward)
        )
        assert found.attention_s == pytest.approx(seconds)
        assert 0 < found.exposed_s < found.attention_s
        assert found.other_s == max(p.num_local for p in plan.rank_plans) * 1000 / 1e9
        assert found.plan_s > 0


def test_all_schemes_are_there_and_those_that_do_not_fit_are_not() -> None:
    assert set(run()) == ALL
    one_head = ModelShape(heads=3, kv_heads=1, head_dim=16)
    assert DCP in run(shape=one_head)


def test_bytes_of_a_dense_ring_by_hand() -> None:
    shape = ModelShape(heads=4, kv_heads=2, head_dim=16, dtype="bf16", windows=((None, 3),))
    found = run(lengths=(512,), shape=shape)["ring"]
    kv = 2 * 2 * 16 * 2  # K and V, KV heads, head dim, bytes
    # forward and backward bring KV to three other ranks, and dKV goes all around: 3 + 3 + 4 hops of every row
    assert found.inter_bytes + found.intra_bytes == 3 * 512 * (3 + 3 + 4) * kv
    assert found.other_s == 128 * 1000 / 1e9
    rows = 128 * (2 * 4 * 16 * 2 + kv)  # a rank's Q and O, K and V
    assert found.memory == rows + 2 * 128 * kv


def test_memory_of_a_plan_without_exchanges_is_its_own_rows() -> None:
    shape = ModelShape(heads=4, kv_heads=2, head_dim=16)
    found = run(lengths=(64, 64, 64, 64), shape=shape)[DCP]
    assert found.inter_bytes + found.intra_bytes == 0
    assert found.memory == 64 * (2 * 4 * 16 * 2 + 2 * 2 * 16 * 2)
    assert found.exposed_s == 0
    assert found.imbalance == pytest.approx(1.0)


def test_sparse_masks_spare_dcp_bytes_and_dense_rings_none() -> None:
    causal, window = run("causal", (2048,)), run("window:64", (2048,))
    assert window["zigzag"].inter_bytes == causal["zigzag"].inter_bytes
    assert window[DCP].inter_bytes < causal[DCP].inter_bytes / 2
    assert window["zigzag row-exact"].inter_bytes < causal["zigzag row-exact"].inter_bytes


def test_rates_matter_and_bytes_do_not_depend_on_them() -> None:
    slow = Setting(Topology.grid(2, 2), SHAPE, DcpConfig(), Rates(1e9, 1e5, 4e6), 1000)
    batch = BatchSpec(LENGTHS, parse_mask("causal"))
    fast, late = outcomes(batch, setting())["zigzag"], outcomes(batch, slow)["zigzag"]
    assert late.attention_s > 3 * fast.attention_s
    assert late.inter_bytes == fast.inter_bytes


def test_a_worker_does_the_same() -> None:
    here, there = run(), evaluate((LENGTHS, "causal", setting()))
    for name in ALL:
        assert np.isclose(here[name].step_s, there[name].step_s)
        assert here[name].inter_bytes == there[name].inter_bytes
    with pytest.raises(ValueError, match="documents"):
        evaluate((LENGTHS, "documents:3,4", setting()))
