"""Kernel calls cover the elements of their items: all of them, once, and no others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dcp.masks import causal, causal_blockwise, lambda_mask
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.plan import Item, RankPlan, Slice, WindowPlan
from hf_dcp.planning.planner import DcpConfig, plan_batch
from hf_dcp.runtime import calls
from hf_dcp.runtime.calls import Call, Kind, build_calls
from tests.planning.strategies import batches, topologies
from tests.runtime.placements import random_placement

SHAPE = ModelShape(4, 2, 8, "fp32")


def elements_of_items(plan: RankPlan, part: WindowPlan, order: np.ndarray) -> dict[tuple[int, int], int]:
    """How often each (Q slot, KV slot) is in the items, row by row from their slices."""
    found: dict[tuple[int, int], int] = {}
    for item in part.items[order]:
        q = plan.slots(item[None, [Item.Q_SLOT, Item.Q_COUNT]])
        kv = plan.slots(item[None, [Item.KV_SLOT, Item.KV_COUNT]])
        allowed = np.zeros((len(q), len(kv)), bool)
        if item[Item.SLICE_BEGIN] == item[Item.SLICE_END]:
            allowed[:] = True
        for s in part.slices[item[Item.SLICE_BEGIN] : item[Item.SLICE_END]].astype(int):
            for token in range(s[Slice.Q_BEGIN], s[Slice.Q_END]):
                step = token - s[Slice.Q_BEGIN]
                row = token - item[Item.Q_TOKEN]
                lo = s[Slice.LO] + step * s[Slice.LO_SLOPE] - item[Item.KV_TOKEN]
                hi = s[Slice.HI] + step * s[Slice.HI_SLOPE] - item[Item.KV_TOKEN]
                if 0 <= row < len(q):
                    allowed[row, max(lo, 0) : max(hi, 0)] = True
        for row, column in zip(*np.nonzero(allowed)):
            key = (int(q[row]), int(kv[column]))
            found[key] = found.get(key, 0) + 1
    return found


def slot_of(plan: RankPlan, group: int, place: int) -> int:
    if place < plan.num_local:
        return place * plan.head_groups + group
    assert place > plan.num_local, "the place between local and remote rows belongs to no row"
    return plan.num_local * plan.head_groups + place - plan.num_local - 1


def elements_of_calls(plan: RankPlan, made: list[Call]) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    for call in (one for repeated in made for one in repeated.single()):
        rows = range(*call.q)
        columns = [place for interval in call.kv for place in range(*interval)]
        assert rows and columns, "kernels die of empty inputs"
        allowed = np.ones((len(rows), len(columns)), bool)
        if call.kind == Kind.CAUSAL:
            assert len(rows) == len(columns)
            allowed = np.tril(allowed)
        if call.kind == Kind.MASKED:
            assert call.mask is not None
            allowed = call.mask.build()
        for row, column in zip(*np.nonzero(allowed)):
            key = (slot_of(plan, call.group, rows[row]), slot_of(plan, call.group, columns[column]))
            found[key] = found.get(key, 0) + 1
    return found


@pytest.mark.parametrize(("cost", "worth"), [(1, 0), (1, 6), (2_000, 1), (470_000, 6)])
@settings(max_examples=25, deadline=None)
@given(batch=batches(max_length=70), topology=topologies, block_size=st.integers(4, 40), seed=st.integers(0, 99))
def test_calls_cover_their_items(cost, worth, batch, topology, block_size, seed):
    config = DcpConfig(block_size=block_size, head_groups=2)
    plan = plan_batch(batch, topology, SHAPE, config, solver=random_placement(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "CALL_COST", cost)
        patch.setattr(calls, "WORTH", worth)
        patch.setattr(calls, "MIN_ROWS", 4)
        for rank_plan in plan.rank_plans:
            part = rank_plan.windows[0]
            for one in (part.forward, part.backward):
                for begin, end in zip(one.divisions[:-1], one.divisions[1:]):
                    made = build_calls(rank_plan, part, one.order[begin:end])
                    want = elements_of_items(rank_plan, part, one.order[begin:end])
                    assert elements_of_calls(rank_plan, made) == want


def whole_plan(mask, length: int) -> RankPlan:
    shape = ModelShape(8, 2, 64, "fp32")
    config = DcpConfig(block_size=512, head_groups=1)
    return plan_batch(BatchSpec([length], mask), Topology((0,)), shape, config).rank(0)


def computed_area(made: list[Call]) -> int:
    return sum(c.count * (c.q[1] - c.q[0]) * sum(b - a for a, b in c.kv) for c in made)


def test_a_causal_square_is_large_rectangles_and_small_triangles():
    plan = whole_plan(causal(), 4096)
    made = build_calls(plan, plan.windows[0], plan.windows[0].forward.order)
    assert {call.kind for call in made if call.q[1] - call.q[0] > 64} == {Kind.FULL}
    assert max(call.q[1] - call.q[0] for call in made if call.kind == Kind.FULL) == 2048
    assert computed_area(made) <= 1.02 * 4096 * 4097 / 2
    # few columns before a triangle are computed with it, under few masks
    masked = [call for call in made if call.kind == Kind.MASKED]
    assert len({call.mask for call in masked}) <= 5 and computed_area(masked) <= 0.1 * computed_area(made)


def test_equal_calls_are_one():
    plan = whole_plan(causal_blockwise(64, 2, 1, 1), 4096)
    made = build_calls(plan, plan.windows[0], plan.windows[0].forward.order)
    assert len(made) <= 20 and max(call.count for call in made) == 7
    steps = {step for call in made if call.count > 1 for step in call.kv_steps}
    assert 0 in steps and len(steps) > 1, "sinks stay where they are, windows move"
    assert all(len(list(call.single())) == call.count for call in made)


def test_a_band_wastes_little():
    plan = whole_plan(lambda_mask(64, 1024), 4096)
    made = build_calls(plan, plan.windows[0], plan.windows[0].forward.order)
    attended = sum(min(64, i + 1) + min(1024, max(0, i + 1 - 64)) for i in range(4096))
    assert computed_area(made) <= 1.25 * attended
    masked = [call for call in made if call.kind == Kind.MASKED]
    inside = [call for call in masked if call.q[0] >= 1024 + 64]
    assert len({call.mask for call in inside}) <= 5 < sum(call.count for call in inside), "equal masks are shared"
    assert len({call.mask for call in masked}) <= 11, "at the beginning, triangles have some more"
