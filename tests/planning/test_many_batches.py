"""Plans of the planner's own search, of all kinds of batches: checked, executed by the numpy reference, balanced."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from hf_dcp.config import DcpConfig
from hf_dcp.planning import BatchSpec, ModelShape, Topology, plan_batch
from hf_dcp.planning.reference import execute
from tests.planning.dense import dense_attention
from tests.planning.rule import expected_bytes
from tests.planning.strategies import any_mask, dense_mask

TOPOLOGIES = {  # devices -> the ways in which they are on nodes, evenly and not, neighbours and not
    1: [(0,)],
    3: [(0, 0, 0), (0, 1, 2), (0, 0, 1), (0, 1, 0)],
    5: [(0, 0, 0, 0, 0), (0, 0, 1, 1, 2), (0, 1, 0, 1, 1)],
    6: [(0, 0, 0, 1, 1, 1), (0, 0, 1, 1, 2, 2), (0, 0, 0, 0, 1, 2), (1, 0, 1, 0, 1, 0)],
    8: [(0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 1, 1, 2, 2, 3, 3), (0, 0, 0, 0, 0, 1, 1, 2)],
    12: [(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2), (0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3)],
}
HEADS = {"MHA": (4, 4), "GQA": (4, 2), "GQA, three queries each": (6, 2), "MQA": (4, 1), "one head": (1, 1)}
CHUNKS, EXAMPLES = 20, 100
NAMES = ("out", "lse", "dq", "dk", "dv")


@st.composite
def lengths(draw: st.DrawFn) -> list[int]:
    """Of one sequence to many: short ones, even ones, equal ones, and one that is longer than all the others."""
    kind = draw(st.sampled_from(["any", "short", "equal", "one long", "one"]))
    if kind == "one":
        return [draw(st.integers(1, 180))]
    if kind == "short":
        return draw(st.lists(st.integers(1, 5), min_size=1, max_size=20))
    if kind == "equal":
        return [draw(st.integers(1, 32))] * draw(st.integers(2, 8))
    if kind == "one long":
        return [draw(st.integers(60, 150)), *draw(st.lists(st.integers(1, 20), max_size=5))]
    return draw(st.lists(st.integers(1, 60), min_size=1, max_size=5))


@st.composite
def batches(draw: st.DrawFn) -> BatchSpec:
    """A mask of its own for every sequence, or, where lengths are equal, maybe the same for all."""
    found = draw(lengths())
    if len(set(found)) == 1 and draw(st.booleans()):
        return BatchSpec(found, draw(any_mask(found[0])))
    return BatchSpec(found, [draw(any_mask(length)) for length in found])


@st.composite
def model_shapes(draw: st.DrawFn) -> ModelShape:
    heads, kv_heads = HEADS[draw(st.sampled_from(list(HEADS)))]
    windows = draw(st.sampled_from([((None, 1),), ((7, 1),), ((None, 2), (5, 3)), ((3, 1), (40, 2))]))
    return ModelShape(heads, kv_heads, draw(st.sampled_from([2, 3])), draw(st.sampled_from(["fp32", "bf16"])), windows)


Question = tuple[BatchSpec, Topology, ModelShape, DcpConfig]


@st.composite
def questions(draw: st.DrawFn) -> Question:
    """What `plan_batch` is asked, with the settings that users may change."""
    shape = draw(model_shapes())
    groups = [g for g in range(1, shape.kv_heads + 1) if shape.kv_heads % g == 0]
    config = DcpConfig(
        block_size=draw(st.one_of(st.just("auto"), st.integers(1, 64))),
        head_groups=draw(st.sampled_from(["auto", *groups])),
        epsilon_inter=draw(st.sampled_from([None, None, 0.4])),
        divisions=draw(st.integers(1, 6)),
        reduce_dtype=draw(st.sampled_from([None, "fp32"])),
        backward_kv=draw(st.sampled_from(["refetch", "keep"])),
        seed=draw(st.integers(0, 3)),
    )
    node = draw(st.sampled_from(TOPOLOGIES[draw(st.sampled_from(list(TOPOLOGIES)))]))
    return draw(batches()), Topology(node), shape, config


def assert_exact_and_balanced(question: Question) -> None:
    """The check, dense attention in fp64 forward and backward, bytes by the rule, and both limits."""
    plan = plan_batch(*question)
    plan.check()
    assert plan.score.status in ("ok", "best_possible") and plan.score.excess == 0
    rng, shape, tokens = np.random.default_rng(0), plan.shape, plan.batch.num_tokens
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    tensors = tuple(rng.standard_normal((tokens, n, shape.head_dim)) for n in heads)
    foreign = np.not_equal.outer(plan.topology.node, plan.topology.node)
    for window, _ in shape.windows:
        expected = dense_attention(*tensors, dense_mask(plan.batch, window))
        result = execute(plan, *tensors, window=window, backward_kv=plan.config.backward_kv)
        for name in NAMES:
            np.testing.assert_allclose(getattr(result, name), getattr(expected, name), rtol=0, atol=1e-11, err_msg=name)
        for which, sent in result.sent.items():
            assert [sent[foreign].sum(), sent[~foreign].sum()] == expected_bytes(plan, window, which)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(questions())
def test_some_batches(question: Question) -> None:
    assert_exact_and_balanced(question)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_many_batches(chunk: int) -> None:
    """Two thousand plans, a hundred at a time."""
    done = 0

    @seed(chunk)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(questions())
    def run(question: Question) -> None:
        nonlocal done
        done += 1
        assert_exact_and_balanced(question)

    run()
    assert done >= EXAMPLES
