"""Static schemes executed by the numpy reference, against dense attention."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dcp.masks import causal, lambda_mask
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.check import PlanError, check
from hf_dcp.planning.plan import Message
from hf_dcp.planning.reference import execute
from hf_dcp.planning.static import SCHEMES, dense_bytes, plan_static
from tests.planning.dense import dense_attention
from tests.planning.strategies import batches, dense_mask, shapes, topologies


def inputs(batch: BatchSpec, shape: ModelShape) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    return tuple(rng.standard_normal((batch.num_tokens, n, shape.head_dim)) for n in heads)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(list(SCHEMES)), batches(max_length=30), topologies, shapes, st.booleans())
def test_static_schemes_compute_dense_attention(
    name: str, batch: BatchSpec, topology: Topology, shape: ModelShape, pad: bool
) -> None:
    plan = plan_static(name, batch, topology, shape, pad=pad)
    plan.check()
    tensors = inputs(plan.batch, shape)
    node = topology.node
    for window, _ in shape.windows:
        expected = dense_attention(*tensors, dense_mask(plan.batch, window))
        for backward_kv in ("refetch", "keep"):
            result = execute(plan.rank_plans, *tensors, window=window, backward_kv=backward_kv)
            for field in ("out", "lse", "dq", "dk", "dv"):
                np.testing.assert_allclose(getattr(result, field), getattr(expected, field), rtol=0, atol=1e-11)
            if pad:
                closed = dense_bytes(name, batch, topology, shape, executed=True)
                foreign = node[:, None] != node[None]
                for which, sent in result.sent.items():
                    assert sent[foreign].sum() == closed[which]["inter_node_bytes"]
                    assert sent[~foreign].sum() == closed[which]["intra_node_bytes"]


@pytest.mark.parametrize("inner", [1, 2, 4])
def test_any_inner_ring_computes_dense_attention(inner: int) -> None:
    batch, shape = BatchSpec([40, 7], causal()), ModelShape(4, 2, 3, "fp32")
    plan = plan_static("loongtrain", batch, Topology.grid(2, 4), shape, inner=inner)
    tensors = inputs(plan.batch, shape)
    expected = dense_attention(*tensors, dense_mask(plan.batch))
    result = execute(plan.rank_plans, *tensors)
    for field in ("out", "lse", "dq", "dk", "dv"):
        np.testing.assert_allclose(getattr(result, field), getattr(expected, field), rtol=0, atol=1e-11)


def test_dense_schedules_send_rows_that_nobody_reads() -> None:
    plan = plan_static("zigzag", BatchSpec([64], lambda_mask(1, 2)), Topology.grid(1, 4), ModelShape(2, 1, 4, "fp32"))
    plan.check()
    with pytest.raises(PlanError):
        check(plan.batch, plan.rank_plans)


@pytest.mark.parametrize("step", [0, 1, 3])  # the chunks of hop 2 are one run
def test_a_hop_with_other_rows_is_noticed(step: int) -> None:
    """The gradients depend on every hop of dKV: rows of the wrong tokens in any of them change the result."""
    batch, shape = BatchSpec([64], causal()), ModelShape(2, 1, 4, "fp32")
    plan = plan_static("zigzag", batch, Topology.grid(1, 4), shape)
    tensors = inputs(batch, shape)
    plans = list(plan.rank_plans)
    part = plans[2].windows[0]
    messages = part.backward.messages
    # dKV that rank 2 receives, in time order; what has only left home is zeros
    at = np.flatnonzero((messages[:, Message.PARTIAL] == 1) & (messages[:, Message.INCOMING] == 1))[step]
    runs = part.backward.kv_runs.copy()
    begin, end = messages[at, Message.KV_BEGIN], messages[at, Message.KV_END]
    assert end - begin == 2
    runs[begin:end] = runs[begin:end][::-1]
    plans[2] = replace(plans[2], windows=(replace(part, backward=replace(part.backward, kv_runs=runs)),))
    same = np.abs(execute(plans, *tensors).dk - execute(plan.rank_plans, *tensors).dk).max() < 1e-11
    assert same == (step == 0)  # zeros in any order
