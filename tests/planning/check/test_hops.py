"""Rows that travel without need, or by other ways than those of the byte rules, are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hf_dcp import masks
from hf_dcp.config import DcpConfig
from hf_dcp.planning import BatchSpec, ModelShape, Plan, Topology, plan_batch, schedule, uses
from hf_dcp.planning.check import PlanError, check
from hf_dcp.planning.messages import both_ends, message_tables
from hf_dcp.planning.static import SCHEMES, plan_static
from tests.planning.check.corrupt import a_plan
from tests.planning.solvers import random_solver

TOPOLOGY = Topology.grid(2, 2)


def refused_but_correct(plan: Plan, words: str) -> None:
    """The plan computes the right thing, but not by the rules."""
    assert check(plan.batch, plan.rank_plans, minimal=False) is None
    with pytest.raises(PlanError) as error:
        check(plan.batch, plan.rank_plans)
    assert words in str(error.value)


def routed(monkeypatch: pytest.MonkeyPatch, source_of: object) -> Plan:
    """A plan in which a row's ways are those of ``source_of(owner, users, user)``."""

    def choose(net, device, owner, weight, node, world):
        source = np.empty(len(net), np.int32)
        for e, (row, user) in enumerate(zip(net.tolist(), device.tolist())):
            source[e] = source_of(int(owner[row]), device[net == row].tolist(), user)
        return source

    monkeypatch.setattr(uses, "choose_gateways", choose)
    return a_plan()


def node(rank: int) -> int:
    return TOPOLOGY.node_of_rank[rank]


def test_the_helper_routes_by_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative controls below differ from this only in the way."""

    def by_the_rules(owner: int, users: list[int], user: int) -> int:
        gateway = max(u for u in users if node(u) == node(user))
        return owner if node(owner) == node(user) or gateway == user else gateway

    plan = routed(monkeypatch, by_the_rules)
    assert check(plan.batch, plan.rank_plans) is None


def test_a_row_enters_a_node_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = routed(monkeypatch, lambda owner, users, user: owner)
    refused_but_correct(plan, "crosses into the same node twice")


def test_a_row_takes_a_detour_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the other node back into the node of the owner."""

    def detour(owner: int, users: list[int], user: int) -> int:
        abroad = [u for u in users if node(u) != node(owner)]
        return (
            abroad[0]
            if abroad and node(user) == node(owner)
            else owner
            if user in abroad[:1]
            else (abroad or [owner])[0]
        )

    refused_but_correct(routed(monkeypatch, detour), "crosses nodes from a rank that isn't its owner")


def test_a_row_comes_from_a_neighbour_of_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    def neighbour(owner: int, users: list[int], user: int) -> int:
        near = [u for u in users if node(u) == node(owner)]
        return near[0] if near and user not in near else owner

    refused_but_correct(routed(monkeypatch, neighbour), "crosses nodes from a rank that isn't its owner")


def test_a_row_takes_a_longer_way_inside_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks of one node: the last gets rows from the second in place of the owner."""

    def choose(net, device, owner, weight, node, world):
        first = np.array([device[net == row].min() for row in net.tolist()], np.int32)
        return np.where(first == device, owner[net], first).astype(np.int32)

    monkeypatch.setattr(uses, "choose_gateways", choose)
    shape, config = ModelShape(2, 1, 4, "fp32"), DcpConfig(block_size=8)
    plan = plan_batch(BatchSpec([64], masks.full()), Topology.grid(1, 3), shape, config)
    refused_but_correct(plan, "doesn't come the way of the byte rules")


def test_results_go_home_without_their_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    def direct(q, kv, timings, kv_partials, local, groups):
        parts = []
        for side, (of_side, timing) in enumerate(zip((q, kv), timings)):
            common = (side, of_side.group, of_side.token, of_side.count)
            there = (of_side.device, of_side.slot)
            way, slot = of_side.source, of_side.source_slot
            parts += both_ends(len(local.count), timing.arrive, 0, way, slot, *there, common)
            if side == 0 or kv_partials:
                relayed = of_side.via >= 0
                way = np.where(relayed, way[of_side.via], way)
                slot = np.where(relayed, slot[of_side.via], slot)
                parts += both_ends(len(local.count), timing.leave, 1, *there, way, slot, common)
        return message_tables(parts, local.count, groups)

    monkeypatch.setattr(schedule, "pass_tables", direct)
    refused_but_correct(a_plan(), "has its result go back another way")


def test_rows_that_nobody_needs() -> None:
    """A plan for a mask, its remote rows those of a denser one."""
    shape, config = ModelShape(2, 1, 4, "fp32"), DcpConfig(block_size=8)
    dense = plan_batch(BatchSpec([64], masks.full()), TOPOLOGY, shape, config, solver=random_solver(3))
    for side in ("q", "kv"):
        plans = []
        for rank_plan in dense.rank_plans:
            part = rank_plan.windows[0]
            # every item attends with the first half of its rows only
            items = part.items.copy()
            items[:, 1 if side == "q" else 3] //= 2
            plans.append(replace(rank_plan, windows=(replace(part, items=items),)))
        half = np.zeros((64, 4, 2), int)
        if side == "q":
            half[np.arange(64) % 8 < 4, 0] = (0, 64)
            batch = BatchSpec([64], masks.from_ranges(half))
        else:
            keys = np.array([[8 * i, 8 * i + 4] for i in range(8)])
            batch = BatchSpec([64], masks.from_ranges(np.repeat(keys[None], 64, 0)))
        assert check(batch, plans, minimal=False) is None
        with pytest.raises(PlanError, match=f"fetches the {side.upper()} row of token .*, but no item there needs it"):
            check(batch, plans)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(
    "topology", [Topology((0,)), TOPOLOGY, Topology((0, 1, 0, 1, 1, 0))], ids=lambda t: t.world_size
)
def test_published_schedules_are_correct_but_not_minimal(name: str, topology: Topology) -> None:
    batch = BatchSpec([37, 20], [masks.causal(), masks.lambda_mask(1, 3)])
    plan = plan_static(name, batch, topology, ModelShape(4, 2, 4))
    assert check(plan.batch, plan.rank_plans, minimal=False) is None
    if topology.world_size > 1:
        with pytest.raises(PlanError, match="but no item there needs it"):
            check(plan.batch, plan.rank_plans)
