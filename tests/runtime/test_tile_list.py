"""Tile lists state every attended pair of their items exactly once, by Q block and by KV block."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hf_dcp.planning.plan import Item, Slice
from hf_dcp.planning.planner import plan_batch
from hf_dcp.runtime.cases import Case
from hf_dcp.runtime.kernels.tile_list import TileList, build_tile_list
from hf_dcp.runtime.selftest import MASKS
from tests.runtime.placements import random_placement


def places(plan, remote, slot, count):
    """Places of a run of rows, and its head group, in plain Python."""
    base = plan.num_local * plan.head_groups
    if slot < base:
        return slot // plan.head_groups + np.arange(count), slot % plan.head_groups
    row = slot - base
    group = np.repeat(remote[:, 2], remote[:, 1])[row]
    return plan.num_local + 1 + row + np.arange(count), int(group)


def pairs_of_items(plan, part, order):
    """int64[group, place, place]: how often each pair occurs in the items, read off the plan element by element."""
    rows = plan.num_local + 1 + part.q_remote[:, 1].sum()
    columns = plan.num_local + 1 + part.kv_remote[:, 1].sum()
    pairs = np.zeros((plan.head_groups, rows, columns), int)
    for item in part.items[order]:
        q, group = places(plan, part.q_remote, item[Item.Q_SLOT], item[Item.Q_COUNT])
        kv, _ = places(plan, part.kv_remote, item[Item.KV_SLOT], item[Item.KV_COUNT])
        token, column = (
            (item[Item.Q_TOKEN] + np.arange(len(q)))[:, None],
            (item[Item.KV_TOKEN] + np.arange(len(kv)))[None],
        )
        allowed = np.full((len(q), len(kv)), item[Item.SLICE_BEGIN] == item[Item.SLICE_END])
        for s in part.slices[item[Item.SLICE_BEGIN] : item[Item.SLICE_END]]:
            step = token - s[Slice.Q_BEGIN]
            inside = (step >= 0) & (token < s[Slice.Q_END])
            lo, hi = s[Slice.LO] + step * s[Slice.LO_SLOPE], s[Slice.HI] + step * s[Slice.HI_SLOPE]
            allowed |= inside & (column >= lo) & (column < hi)
        pairs[group][np.ix_(q, kv)] += allowed
    return pairs


def pairs_of_tiles(tiles: TileList, like: np.ndarray, by: str) -> np.ndarray:
    """The same from a tile list."""
    pairs = np.zeros_like(like)
    blocks, entries = (tiles.q_blocks, tiles.q_entries) if by == "q" else (tiles.kv_blocks, tiles.kv_entries)
    for place, count, group, begin, masked, end in blocks:
        for e in range(begin, end):
            other, other_count, number = entries[e]
            q, rows, kv, columns = (
                (place, count, other, other_count) if by == "q" else (other, other_count, place, count)
            )
            if e < masked:
                assert (rows, columns, number) == (tiles.tokens, tiles.columns, -1)
                pairs[group, q : q + rows, kv : kv + columns] += 1
                continue
            table = tiles.ranges[number]
            assert table.any() and not table[rows:].any(), "rows behind the block attend to nothing"
            for row, (lo, hi) in enumerate(table[:rows]):
                assert 0 <= lo <= hi <= columns
                pairs[group, q + row, kv + lo : kv + hi] += 1
    return pairs


CASES = [Case(mask, (150, 37), 16 if n % 2 else 64, seed=n) for n, mask in enumerate(MASKS)]
CASES += [replace(CASES[0], window=20), replace(CASES[1], window=33, head_groups=1), Case("causal", (3, 1, 2), 16)]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
@pytest.mark.parametrize("tokens,columns", [(32, 64), (8, 16), (18, 16), (3, 5)])
def test_every_attended_pair_is_in_one_tile(case, tokens, columns):
    plan = plan_batch(case.batch, case.topology(3), case.shape(), case.config(), solver=random_placement(case.seed))
    total = 0
    for rank_plan in plan.rank_plans:
        part = rank_plan.window(case.window)
        for which, one in part.passes():
            for d in range(len(one.divisions) - 1):
                order = one.order[one.divisions[d] : one.divisions[d + 1]]
                want = pairs_of_items(rank_plan, part, order)
                tiles = build_tile_list(rank_plan, part, order, tokens, columns)
                assert np.array_equal(pairs_of_tiles(tiles, want, "q"), want)
                assert np.array_equal(pairs_of_tiles(tiles, want, "kv"), want)
                total += int(want.sum()) * (which == "forward")
                load = tiles.q_blocks[:, 5] - tiles.q_blocks[:, 3]
                assert np.all(load[:-1] >= load[1:]) and np.all(load > 0)
    assert total > 0


def test_wide_blocks_are_mostly_full():
    case = Case("causal", (2048,), 256)
    plan = plan_batch(case.batch, case.topology(1), case.shape(), case.config()).rank(0)
    part = plan.window(None)
    tiles = build_tile_list(plan, part, np.arange(len(part.items)), 64, 64)
    groups = plan.head_groups
    assert tiles.entries == groups * 32 * 33 // 2 and tiles.entries - tiles.full == groups * 32
    assert len(tiles.ranges) == groups * 32
