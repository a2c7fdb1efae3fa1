"""Plans with random placements, executed by the numpy reference, against dense attention."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dcp import masks
from hf_dcp.config import DcpConfig
from hf_dcp.planning import BatchSpec, ModelShape, Plan, Topology, plan_batch
from hf_dcp.planning.reference import DeadlockError, Result, execute
from tests.planning.dense import dense_attention
from tests.planning.solvers import random_solver
from tests.planning.strategies import batches, dense_mask, shapes, topologies


def inputs(plan: Plan, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng, shape, tokens = np.random.default_rng(seed), plan.shape, plan.batch.num_tokens
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    return tuple(rng.standard_normal((tokens, n, shape.head_dim)) for n in heads)


def assert_exact(plan: Plan, result: Result, tensors: tuple[np.ndarray, ...], window: int | None) -> None:
    expected = dense_attention(*tensors, dense_mask(plan.batch, window))
    for name in ("out", "lse", "dq", "dk", "dv"):
        np.testing.assert_allclose(getattr(result, name), getattr(expected, name), rtol=0, atol=1e-11, err_msg=name)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_plan_computes_dense_attention(data: st.DataObject) -> None:
    batch, shape, topology = data.draw(batches()), data.draw(shapes), data.draw(topologies)
    groups = data.draw(st.sampled_from([g for g in (1, 2) if shape.kv_heads % g == 0]))
    config = DcpConfig(
        block_size=data.draw(st.integers(1, 40)), head_groups=groups, divisions=data.draw(st.integers(1, 6))
    )
    plan = plan_batch(batch, topology, shape, config, solver=random_solver(data.draw(st.integers(0, 99))))
    tensors = inputs(plan)
    for window, _ in shape.windows:
        for backward_kv in ("refetch", "keep"):
            result = execute(plan.rank_plans, *tensors, window=window, backward_kv=backward_kv)
            assert_exact(plan, result, tensors, window)


def a_plan() -> Plan:
    batch = BatchSpec([37, 20], [masks.causal(), masks.lambda_mask(2, 7)])
    config = DcpConfig(block_size=8)
    return plan_batch(batch, Topology.grid(2, 2), ModelShape(4, 2, 4, "fp32"), config, solver=random_solver(3))


def changed(plan: Plan, rank: int, **window_changes: object) -> list:
    plans = list(plan.rank_plans)
    part = replace(plans[rank].windows[0], **window_changes)
    plans[rank] = replace(plans[rank], windows=(part,))
    return plans


def test_a_dropped_item_is_noticed() -> None:
    plan = a_plan()
    forward = plan.rank(1).windows[0].forward
    divisions = forward.divisions.copy()
    divisions[-1] -= 1
    result = execute(changed(plan, 1, forward=replace(forward, divisions=divisions)), *inputs(plan))
    with pytest.raises(AssertionError):
        assert_exact(plan, result, inputs(plan), None)


def test_a_dropped_message_is_a_deadlock() -> None:
    plan = a_plan()
    forward = plan.rank(1).windows[0].forward
    outgoing = np.flatnonzero(forward.messages[:, 2] == 0)
    fewer = replace(forward, messages=np.delete(forward.messages, outgoing[0], axis=0))
    with pytest.raises(DeadlockError):
        execute(changed(plan, 1, forward=fewer), *inputs(plan))


def test_a_rank_may_own_nothing() -> None:
    plan = plan_batch(BatchSpec([3], masks.causal()), Topology.grid(1, 4), ModelShape(2, 1, 2, "fp32"))
    assert 0 in [p.num_local for p in plan.rank_plans]
    assert_exact(plan, execute(plan.rank_plans, *inputs(plan)), inputs(plan), None)
