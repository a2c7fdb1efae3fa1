"""The segments that FlashAttention computes cover every attended pair exactly once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from hf_dcp.config import DcpConfig
from hf_dcp.masks import (
    causal,
    causal_blockwise,
    documents,
    from_ranges,
    full,
    lambda_mask,
    shared_question,
    sliding_window,
)
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.planner import plan_batch
from hf_dcp.runtime.kernels import segments as module
from hf_dcp.runtime.kernels.segments import NONE, Segment, build_segments, rounds
from tests.runtime.placements import random_placement
from tests.runtime.test_tile_list import pairs_of_items

MASKS_PER_PLAN, PLANS = 10, 100


def random_mask(rng, length):
    """Any kind of mask with any parameters."""
    kind = rng.integers(0, 8)
    if kind == 0:
        return causal()
    if kind == 1:
        return full()
    if kind == 2:
        return sliding_window(int(rng.integers(1, length + 2)))
    if kind == 3:
        return lambda_mask(int(rng.integers(0, length)), int(rng.integers(1, length + 2)))
    if kind == 4:
        return causal_blockwise(*(int(x) for x in rng.integers((1, 1, 0, 0), (9, 4, 3, 3))))
    if kind == 5:
        question = int(rng.integers(0, length + 1))
        cut = int(rng.integers(0, length - question + 1))
        return shared_question(question, [cut, length - question - cut])
    if kind == 6:
        first = int(rng.integers(1, length + 1))
        return documents([n for n in (first, length - first) if n], causal())
    lo, hi = np.sort(rng.integers(0, length + 1, (2, length, 2)), axis=0)
    step = np.arange(length)[:, None]
    slopes = rng.integers(0, 2, (2, 2))  # straight runs, of all four kinds
    lo, hi = np.minimum(lo[:1] + step * slopes[0], length), np.minimum(hi[:1] + step * slopes[1], length)
    return from_ranges(np.stack([lo, np.maximum(lo, hi)], 2).astype(np.int32))


def random_plan(seed):
    rng = np.random.default_rng(seed)
    lengths = [int(n) for n in rng.integers(1, 40, MASKS_PER_PLAN)]
    batch = BatchSpec(lengths, [random_mask(rng, length) for length in lengths])
    config = DcpConfig(block_size=int(rng.choice((4, 8, 16))), divisions=2)
    shape = ModelShape(2, 2, 16, "bf16", ((None, 1),))
    return plan_batch(batch, Topology((0, 0, 1)), shape, config, solver=random_placement(seed))


def pairs_of_segments(segments, like):
    pairs = np.zeros_like(like)
    for s in segments:
        pairs[s.group, s.q_begin : s.q_end, s.kv_begin : s.kv_end] += s.allowed()
    return pairs


def divisions(plan):
    for rank_plan in plan.rank_plans:
        part = rank_plan.window(None)
        bounds = part.forward.divisions
        for begin, end in pairwise(bounds):
            yield rank_plan, part, part.forward.order[begin:end]


def test_a_thousand_masks_are_covered_once():
    pairs = masks = 0
    windows = set()
    for seed in range(PLANS):
        plan = random_plan(seed)
        masks += len(plan.batch.masks)
        for rank_plan, part, order in divisions(plan):
            want = pairs_of_items(rank_plan, part, order)
            found = build_segments(rank_plan, part, order)
            assert np.array_equal(pairs_of_segments(found, want), want), f"plan {seed}, rank {rank_plan.rank}"
            assert all(s.allowed().any(1).all() for s in found), "a kernel is never given rows without columns"
            windows |= {s.window for s in found}
            pairs += int(want.sum())
    assert masks == 1000 and pairs > 100_000
    kinds = {(left > NONE, right > NONE) for left, right in windows}
    assert kinds == {(False, False), (False, True), (True, False), (True, True)}, "every kind of slice occurs"


def test_an_off_by_one_window_is_found(monkeypatch):
    straight = module._straight

    def wrong(*arguments):
        s = straight(*arguments)
        return s and Segment(s.group, s.q_begin, s.q_end, s.kv_begin, s.kv_end, s.left, 1 if s.right == 0 else s.right)

    monkeypatch.setattr(module, "_straight", wrong)
    plan = random_plan(0)
    differ = [
        not np.array_equal(pairs_of_segments(build_segments(*division), want), want)
        for division in divisions(plan)
        for want in [pairs_of_items(*division)]
    ]
    assert any(differ)


@pytest.mark.parametrize("seed", range(5))
def test_rounds_have_no_row_and_no_column_twice(seed):
    for division in divisions(random_plan(seed)):
        found = build_segments(*division)
        grouped = rounds(found)
        assert sorted(s for r in grouped for s in r.segments) == found
        for r in grouped:
            assert {(s.group, s.window) for s in r.segments} == {(r.group, r.window)}
            for side in (("q_begin", "q_end"), ("kv_begin", "kv_end")):
                spans = sorted((getattr(s, side[0]), getattr(s, side[1])) for s in r.segments)
                assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_causal_tiles_side_by_side_are_one_call():
    batch = BatchSpec([1024], [causal()])
    shape = ModelShape(2, 2, 16, "bf16", ((None, 1),))
    plan = plan_batch(batch, Topology((0,)), shape, DcpConfig(block_size=128, divisions=1)).rank(0)
    part = plan.window(None)
    found = build_segments(plan, part, np.arange(len(part.items)))
    assert len(found) <= 8 * plan.head_groups
