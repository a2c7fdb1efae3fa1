"""Plans with random placements: checked, and executed by the numpy reference, against dense attention and byte rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dcp import masks
from hf_dcp.config import DcpConfig
from hf_dcp.planning import BatchSpec, ModelShape, Plan, Topology, plan_batch
from hf_dcp.planning.check import PlanError
from hf_dcp.planning.plan import Message, Op
from hf_dcp.planning.reference import DeadlockError, Result, execute
from tests.planning.dense import dense_attention
from tests.planning.rule import expected_bytes
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


def assert_bytes(plan: Plan, result: Result, window: int | None) -> None:
    foreign = np.not_equal.outer(plan.topology.node, plan.topology.node)
    for which, sent in result.sent.items():
        assert [sent[foreign].sum(), sent[~foreign].sum()] == expected_bytes(plan, window, which)


@st.composite
def any_plan(draw: st.DrawFn) -> Plan:
    batch, shape, topology = draw(batches()), draw(shapes), draw(topologies)
    config = DcpConfig(
        block_size=draw(st.integers(1, 40)),
        head_groups=draw(st.sampled_from([g for g in (1, 2) if shape.kv_heads % g == 0])),
        divisions=draw(st.integers(1, 6)),
        reduce_dtype=draw(st.sampled_from([None, "fp32", "bf16"])),
    )
    return plan_batch(batch, topology, shape, config, solver=random_solver(draw(st.integers(0, 99))))


@settings(max_examples=40, deadline=None)
@given(any_plan())
def test_any_plan_computes_dense_attention(plan: Plan) -> None:
    assert_right(plan)


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(any_plan())
def test_many_plans_compute_dense_attention(plan: Plan) -> None:
    assert_right(plan)


def assert_right(plan: Plan) -> None:
    """The plan passes its check, gives dense attention in all passes, and sends the bytes of the rule and the score."""
    plan.check()
    tensors = inputs(plan)
    device_bytes = {}
    for window, layers in plan.shape.windows:
        for backward_kv in ("refetch", "keep"):
            result = execute(plan, *tensors, window=window, backward_kv=backward_kv)
            assert_exact(plan, result, tensors, window)
            assert_bytes(plan, result, window)
            for which, sent in result.sent.items():
                total = device_bytes.setdefault((which, backward_kv), np.zeros(plan.topology.world_size, np.int64))
                total += layers * (sent.sum(0) + sent.sum(1))
    for (which, _), total in device_bytes.items():
        assert plan.score.passes[which].max_device == total.max()


def test_the_score_counts_the_same_bytes() -> None:
    plan = a_plan(windows=((None, 2), (5, 3)))
    for which in ("forward", "backward", "backward_keep"):
        by_window = [[layers * n for n in expected_bytes(plan, w, which)] for w, layers in plan.shape.windows]
        score = plan.score.passes[which]
        assert [score.inter_node, score.intra_node] == np.sum(by_window, axis=0).tolist() and score.inter_node > 0


def a_plan(**shape_changes: object) -> Plan:
    batch = BatchSpec([37, 20], [masks.causal(), masks.lambda_mask(2, 7)])
    shape = replace(ModelShape(4, 2, 4, "fp32"), **shape_changes)
    return plan_batch(batch, Topology.grid(2, 2), shape, DcpConfig(block_size=8), solver=random_solver(3))


def changed(plan: Plan, rank: int, **forward_changes: object) -> list:
    plans = list(plan.rank_plans)
    part = plans[rank].windows[0]
    part = replace(part, forward=replace(part.forward, **forward_changes))
    plans[rank] = replace(plans[rank], windows=(part,))
    return plans


def test_a_dropped_item_is_noticed() -> None:
    plan = a_plan()
    divisions = plan.rank(1).windows[0].forward.divisions.copy()
    divisions[-1] -= 1
    result = execute(changed(plan, 1, divisions=divisions), *inputs(plan))
    with pytest.raises(AssertionError):
        assert_exact(plan, result, inputs(plan), None)


def test_wrong_bytes_are_noticed() -> None:
    plan = a_plan()
    result = execute(plan, *inputs(plan))
    result.sent["forward"][0, 1] += 4
    with pytest.raises(AssertionError):
        assert_bytes(plan, result, None)


def test_a_dropped_message_is_a_deadlock() -> None:
    plan = a_plan()
    messages = plan.rank(1).windows[0].forward.messages
    outgoing = np.flatnonzero(messages[:, Message.INCOMING] == 0)
    with pytest.raises(DeadlockError, match="waits for a message that rank 1 never sends"):
        execute(changed(plan, 1, messages=np.delete(messages, outgoing[0], axis=0)), *inputs(plan))
    incoming = np.flatnonzero(messages[:, Message.INCOMING] == 1)
    with pytest.raises((DeadlockError, PlanError)):
        execute(changed(plan, 1, messages=np.delete(messages, incoming[0], axis=0)), *inputs(plan))


def test_an_exchange_that_is_never_started_is_a_deadlock() -> None:
    plan = a_plan()
    program = plan.rank(1).windows[0].forward.program
    without = program[program[:, 0] != Op.START]
    with pytest.raises(DeadlockError, match="which it hasn't started"):
        execute(changed(plan, 1, program=without), *inputs(plan))


def test_rows_are_not_used_before_they_arrive() -> None:
    plan = a_plan()
    program = plan.rank(1).windows[0].forward.program
    attend = program[:, 0] == Op.ATTEND
    early = np.concatenate([program[attend], program[~attend]])
    with pytest.raises(PlanError, match="rank 1 attends with rows that it doesn't have"):
        execute(changed(plan, 1, program=early), *inputs(plan))


def test_a_rank_may_own_nothing() -> None:
    plan = plan_batch(BatchSpec([3], masks.causal()), Topology.grid(1, 4), ModelShape(2, 1, 2, "fp32"))
    plan.check()
    assert 0 in [p.num_local for p in plan.rank_plans]
    assert_exact(plan, execute(plan, *inputs(plan)), inputs(plan), None)


def test_tokens_that_attend_to_nothing() -> None:
    ranges = np.zeros((20, 1, 2), np.int64)
    ranges[3:9, 0] = (5, 18)
    batch = BatchSpec([20, 4], [masks.from_ranges(ranges), masks.causal()])
    plan = plan_batch(batch, Topology.grid(2, 2), ModelShape(4, 2, 4), DcpConfig(block_size=3), solver=random_solver(1))
    plan.check()
    result = execute(plan, *inputs(plan))
    assert_exact(plan, result, inputs(plan), None)
    nothing = np.r_[0:3, 9:20]
    assert (result.out[nothing] == 0).all() and np.isneginf(result.lse[nothing]).all() and np.isfinite(result.dq).all()
