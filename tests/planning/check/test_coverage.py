"""Items that don't compute the mask are refused, and the refusal names a pair that is wrong."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dcp import masks
from hf_dcp.config import DcpConfig
from hf_dcp.planning import BatchSpec, ModelShape, Plan, RankPlan, Topology, plan_batch
from hf_dcp.planning.check import PlanError, check
from hf_dcp.planning.check.coverage import Expected, Fingerprints
from hf_dcp.planning.plan import Item, Slice, WindowPlan
from tests.planning.check.corrupt import Plans, a_plan, with_arrays, with_part
from tests.planning.solvers import random_solver
from tests.planning.strategies import batches, dense_mask

SENTENCE = re.compile(
    r"all ranks: query token (\d+) (attends|must not attend) to KV token (\d+) \(head group (\d)\), "
    r"but the items compute this pair (\d+) times$"
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return a_plan()


def refused(plan: Plan, plans: Plans | tuple[RankPlan, ...], batch: BatchSpec | None = None) -> tuple[int, int, int]:
    """The pair that the refusal names, and how often it says that it is computed; what it says of the mask is true."""
    batch = batch or plan.batch
    with pytest.raises(PlanError) as error:
        check(batch, plans)
    found = SENTENCE.search(str(error.value))
    assert found, str(error.value)
    q, kv, times = int(found[1]), int(found[3]), int(found[5])
    attends = found[2] == "attends"
    assert attends == dense_mask(batch)[q, kv] and times != attends
    return q, kv, times


def with_items(plans: Plans, rank: int, kept: list[int]) -> Plans:
    """The plans with a selection of items of this rank; every division computes what is left of it."""

    def change(part: WindowPlan) -> WindowPlan:
        passes = {}
        for name, one in part.passes():
            place = [[new for new, old in enumerate(kept) if old == i] for i in one.order.tolist()]
            sizes = [sum(len(place[i]) for i in range(b, e)) for b, e in zip(one.divisions, one.divisions[1:])]
            order = np.array([new for new_items in place for new in new_items], np.int32)
            divisions = np.append(0, np.cumsum(sizes)).astype(np.int32)
            passes[name] = replace(one, order=order, divisions=divisions)
        return replace(part, items=part.items[kept], **passes)

    return with_part(plans, rank, change)


@pytest.mark.parametrize("index", [0, 3, -1])
def test_an_item_is_dropped(plan: Plan, index: int) -> None:
    items = plan.rank(1).windows[0].items
    kept = np.delete(np.arange(len(items)), index).tolist()
    assert refused(plan, with_items(plan.rank_plans, 1, kept))[2] == 0


@pytest.mark.parametrize("index", [0, 3, -1])
def test_an_item_is_doubled(plan: Plan, index: int) -> None:
    everything = list(range(len(plan.rank(1).windows[0].items)))
    item = plan.rank(1).windows[0].items[index]
    q, kv, times = refused(plan, with_items(plan.rank_plans, 1, [*everything, everything[index]]))
    assert times == 2 and item[Item.Q_TOKEN] <= q < item[Item.Q_TOKEN] + item[Item.Q_COUNT]
    assert item[Item.KV_TOKEN] <= kv < item[Item.KV_TOKEN] + item[Item.KV_COUNT]


@pytest.mark.parametrize("column", list(Slice))
@pytest.mark.parametrize("change", [1, -1])
def test_a_slice_is_shifted(plan: Plan, column: Slice, change: int) -> None:
    slices = plan.rank(1).windows[0].slices
    refusals = 0
    for i in range(len(slices)):
        damaged = slices.copy()
        if column in (Slice.LO_SLOPE, Slice.HI_SLOPE):
            damaged[i, column] = 1 - damaged[i, column]
        else:
            damaged[i, column] += change
        if np.array_equal(*(attended(part, plan) for part in (slices, damaged))):
            continue  # no row of an item is touched: a slope of one row, a change outside of the KV rows
        refused(plan, with_arrays(plan.rank_plans, 1, slices=lambda _, damaged=damaged: damaged))
        refusals += 1
    assert refusals


def attended(slices: np.ndarray, plan: Plan) -> np.ndarray:
    """int[groups, tokens, tokens]: pairs that the items of rank 1 compute with these slices."""
    part, rank_plan = plan.rank(1).windows[0], plan.rank(1)
    result = np.zeros((2, plan.batch.num_tokens, plan.batch.num_tokens), int)
    own = rank_plan.num_local * 2
    remote = np.repeat(part.q_remote[:, 2], part.q_remote[:, 1])
    for item in part.items.tolist():
        slot, begin, end = item[Item.Q_SLOT], item[Item.SLICE_BEGIN], item[Item.SLICE_END]
        group = slot % 2 if slot < own else remote[slot - own]
        q, kv = item[Item.Q_TOKEN], item[Item.KV_TOKEN]
        for first, last, lo, hi, lo_slope, hi_slope in slices[begin:end].tolist():
            for row in range(max(first, q), min(last, q + item[Item.Q_COUNT])):
                a, b = lo + (row - first) * lo_slope, hi + (row - first) * hi_slope
                a, b = max(a, kv), min(b, kv + item[Item.KV_COUNT])
                if a < b:
                    result[group, row, a:b] += 1
    return result


def test_a_masked_item_is_computed_in_full(plan: Plan) -> None:
    items = plan.rank(1).windows[0].items
    masked = np.flatnonzero(items[:, Item.SLICE_BEGIN] < items[:, Item.SLICE_END])[0]

    def unmasked(items: np.ndarray) -> np.ndarray:
        items[masked, Item.SLICE_END] = items[masked, Item.SLICE_BEGIN]
        return items

    refused(plan, with_arrays(plan.rank_plans, 1, items=unmasked))


def test_the_plan_of_another_mask_is_refused(plan: Plan) -> None:
    almost = masks.from_ranges(normalised_but_one(masks.causal().ranges(61)))
    refused(plan, plan.rank_plans, BatchSpec([61, 30, 3], [almost, *plan.batch.masks[1:]]))
    refused(plan, plan.rank_plans, BatchSpec([61, 30, 3], [masks.causal(), masks.lambda_mask(2, 8), masks.full()]))
    refused(plan, plan.rank_plans, BatchSpec([61, 30, 3], [masks.causal(), masks.lambda_mask(2, 6), masks.full()]))
    refused(plan, plan.rank_plans, BatchSpec([30, 61, 3], [plan.batch.masks[i] for i in (1, 0, 2)]))


def normalised_but_one(ranges: np.ndarray) -> np.ndarray:
    """Without the pair (40, 0)."""
    changed = ranges.copy()
    changed[40, 0, 0] = 1
    return changed


def test_windows_are_told_apart(plan: Plan) -> None:
    swapped = []
    for rank_plan in plan.rank_plans:
        whole, window = rank_plan.windows
        parts = (replace(window, window=None), replace(whole, window=9))
        swapped.append(replace(rank_plan, windows=parts))
    refused(plan, swapped)
    second = [replace(p, windows=(p.windows[0], replace(p.windows[0], window=9))) for p in plan.rank_plans]
    with pytest.raises(PlanError, match="^window 9, all ranks: query token 9 must not attend to KV token 0"):
        check(plan.batch, second)


@settings(max_examples=60, deadline=None)
@given(batches(), st.one_of(st.none(), st.integers(1, 12)))
def test_expected_fingerprints_are_those_of_the_dense_mask(batch: BatchSpec, window: int | None) -> None:
    prints = Fingerprints.of(batch.num_tokens)
    expected, mask = Expected.of(batch, window, prints), dense_mask(batch, window)
    for sums, number, rows in ((expected.q, np.diff(prints.kv), mask), (expected.kv, np.diff(prints.q), mask.T)):
        assert [int(x) for x in sums] == [sum(int(n) for n in number[row]) % 2**64 for row in rows]


def test_fingerprints_are_distinct() -> None:
    prints = Fingerprints.of(1000)
    assert len(set(np.diff(prints.q).tolist()) | set(np.diff(prints.kv).tolist())) == 2000


@pytest.mark.slow
def test_long_plans_are_checked_quickly() -> None:
    batch, shape = BatchSpec([131072], masks.causal()), ModelShape(8, 2, 128)
    config = DcpConfig(block_size=1024, head_groups=2)
    plan = plan_batch(batch, Topology.grid(4, 8), shape, config, solver=random_solver(1, stay=0.9))
    times = []
    for _ in range(2):  # the first compiles
        begin = time.process_time()
        plan.check()
        times.append(time.process_time() - begin)
    assert min(times) < 4
