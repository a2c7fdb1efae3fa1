"""Plans that don't belong together, or whose tables are not well formed, are refused with the right words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from hf_dcp import masks
from hf_dcp.planning import BatchSpec, Plan
from hf_dcp.planning.check import PlanError, check
from hf_dcp.planning.plan import Item, Message, Op, Slice
from tests.planning.check.corrupt import Plans, a_plan, add, moved, put, with_arrays, with_pass


@pytest.fixture(scope="module")
def plan() -> Plan:
    return a_plan()


def refused(plan: Plan, plans: Plans, words: str) -> None:
    with pytest.raises(PlanError) as error:
        check(plan.batch, plans)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_good_plans_pass(plan: Plan) -> None:
    assert check(plan.batch, plan.rank_plans) is None
    plan.check()
    assert check(plan.batch, plan.rank_plans, minimal=False) is None


def test_plans_of_one_group(plan: Plan) -> None:
    plans = list(plan.rank_plans)

    def other(**changes: object) -> Plans:
        return [*plans[:2], replace(plans[2], **changes), plans[3]]

    refused(plan, [], "no rank plan")
    refused(plan, plans[:3], "3 rank plans for a group of 4 ranks")
    refused(plan, [plans[1], plans[0], *plans[2:]], "the plan of rank 0 says that it is that of rank 1")
    refused(plan, other(digest=1), "digest of rank 2 differs")
    refused(plan, other(node_of_rank=(0, 1, 0, 1)), "node_of_rank of rank 2 differs")
    refused(plan, other(head_groups=1), "head_groups of rank 2 differs")
    refused(plan, other(reduce_dtype="bf16"), "reduce_dtype of rank 2 differs")
    refused(plan, other(num_tokens=5), "num_tokens of rank 2 differs")
    refused(plan, other(shape=replace(plan.shape, head_dim=8)), "shape of rank 2 differs")
    refused(plan, other(windows=plans[2].windows[:1]), "rank 2 has parts for the windows [None], but the model has")


def test_plans_of_another_batch(plan: Plan) -> None:
    with pytest.raises(PlanError, match="the plan is for 94 tokens, but the batch has 93"):
        check(BatchSpec([61, 30, 2], masks.causal()), plan.rank_plans)


def test_every_token_has_one_owner(plan: Plan) -> None:
    def runs(rank: int, value: list) -> Plans:
        plans = list(plan.rank_plans)
        plans[rank] = replace(plans[rank], token_runs=np.array(value, np.int32).reshape(-1, 2))
        return plans

    own = plan.rank(0).token_runs.tolist()
    refused(plan, runs(0, own[1:]), "token 0 has 0 owners")
    refused(plan, runs(1, [[0, 1], *plan.rank(1).token_runs.tolist()]), "token 0 has 2 owners")
    refused(plan, runs(0, own[::-1]), "rank 0: token_runs must ascend")
    refused(plan, runs(0, [[own[0][0], 0], *own[1:]]), "rank 0: token_runs must ascend, without empty runs")
    refused(plan, runs(0, [*own[:-1], [94, 1]]), "beyond the 94 tokens")
    refused(plan, runs(0, [[-1, 1], *own]), "beyond the 94 tokens")


ITEMS: dict[str, tuple[Callable, str]] = {
    "slot beyond": (put((0, Item.Q_SLOT), 10**6), "rank 1: the Q rows of an item: a run of slots goes beyond"),
    "negative slot": (put((0, Item.KV_SLOT), -1), "rank 1: the KV rows of an item: a run of slots goes beyond"),
    "no rows": (put((0, Item.Q_COUNT), 0), "the Q rows of an item: a run of slots goes beyond"),
    "too many rows": (put((0, Item.KV_COUNT), 10**6), "the KV rows of an item: a run of slots goes beyond"),
    "over a block's end": (
        put((0, [Item.Q_SLOT, Item.Q_COUNT]), [0, 9]),
        "the Q rows of an item: a run of slots isn't one of consecutive tokens",
    ),
    "another token": (add((3, Item.KV_TOKEN), 1), "the KV slot of an item holds another token"),
    "slices beyond": (put((0, [Item.SLICE_BEGIN, Item.SLICE_END]), [0, 10**6]), "an item has slices that don't exist"),
    "slices backwards": (put((0, [Item.SLICE_BEGIN, Item.SLICE_END]), [2, 1]), "an item has slices that don't exist"),
    "columns": (lambda items: items[:, :7], "rank 1: items must have 8 columns"),
}


@pytest.mark.parametrize("name", ITEMS)
def test_items(plan: Plan, name: str) -> None:
    edit, words = ITEMS[name]
    refused(plan, with_arrays(plan.rank_plans, 1, items=edit), words)


def test_items_of_two_head_groups(plan: Plan) -> None:
    items, rank_plan = plan.rank(1).windows[0].items, plan.rank(1)
    own = np.flatnonzero(items[:, Item.Q_SLOT] < rank_plan.num_local * rank_plan.head_groups)
    group = items[own[0], Item.Q_SLOT] % 2
    other = with_arrays(plan.rank_plans, 1, items=add((own[0], Item.Q_SLOT), 1 - 2 * group))
    refused(plan, other, "an item has Q rows of one head group and KV rows of another")


def test_slices(plan: Plan) -> None:
    edit = put((0, Slice.LO_SLOPE), 2)
    refused(plan, with_arrays(plan.rank_plans, 1, slices=edit), "slopes of slices must be 0 or 1")
    refused(plan, with_arrays(plan.rank_plans, 1, slices=lambda s: s[:, :5]), "rank 1: slices must have 6 columns")


REMOTE: dict[str, tuple[Callable, str]] = {
    "order": (lambda table: table[::-1].copy(), "remote rows must be sorted by head group and token"),
    "twice": (lambda table: table[[0, *range(len(table))]], "remote rows must be sorted by head group and token, each"),
    "group": (put((-1, 2), 2), "there are only 2 head groups"),
    "token": (put((-1, 0), 94), "no such token"),
    "count": (put((-1, 1), 0), "no such token"),
    "type": (lambda table: table.astype(np.int64), "must be int32"),
}


@pytest.mark.parametrize("name", REMOTE)
def test_remote_rows(plan: Plan, name: str) -> None:
    edit, words = REMOTE[name]
    for side in ("Q", "KV"):
        plans = with_arrays(plan.rank_plans, 2, **{f"{side.lower()}_remote": edit})
        refused(plan, plans, words)
        refused(plan, plans, f"rank 2, remote {side} rows")


def test_remote_rows_are_not_the_ranks_own(plan: Plan) -> None:
    token, _ = plan.rank(2).token_runs[0].tolist()
    table = np.array([[token, 1, 0]], np.int32)
    refused(plan, with_arrays(plan.rank_plans, 2, q_remote=lambda _: table), "own rows must not be remote ones")


PASSES: dict[str, tuple[dict[str, Callable], str]] = {
    "item left out": ({"order": lambda order: order[:-1]}, "order must have every item exactly once"),
    "item repeated": ({"order": put(0, 1)}, "order must have every item exactly once"),
    "item left to no division": ({"divisions": add(-1, -1)}, "divisions must cut the order of items"),
    "divisions backwards": ({"divisions": put(1, 10**4)}, "divisions must cut the order of items"),
    "message columns": ({"messages": lambda table: table[:, :7]}, "messages must have 8 columns"),
    "peer itself": ({"messages": put((0, Message.PEER), 1)}, "a message has a peer that is none"),
    "no such peer": ({"messages": put((0, Message.PEER), 4)}, "a message has a peer that is none"),
    "flags": ({"messages": put((0, Message.PARTIAL), 2)}, "incoming and partial of messages must be 0 or 1"),
    "message order": ({"messages": lambda table: table[[1, 0, *range(2, len(table))]]}, "messages are not sorted"),
    "message twice": ({"messages": lambda table: table[[0, *range(len(table))]]}, "messages are not sorted, or one is"),
    "runs left out": ({"messages": add((-1, Message.KV_END), -1)}, "messages must share out the KV runs in order"),
    "runs of a gap": ({"messages": add((3, Message.Q_BEGIN), 1)}, "messages must share out the Q runs in order"),
    "empty message": (
        {"messages": lambda table: np.vstack([table, [[99, 0, 0, 0, *np.repeat(table[-1, [5, 7]], 2)]]])},
        "a message has no rows",
    ),
    "run beyond": ({"q_runs": put((0, 0), 10**6)}, "the Q rows of a message: a run of slots goes beyond"),
    "run not consecutive": ({"kv_runs": add((slice(None), 1), 2)}, "the KV rows of a message: a run of slots"),
    "unknown instruction": ({"program": lambda p: np.vstack([p[:1], [[9, 0]], p[1:]])}, "unknown instructions"),
    "no start": ({"program": lambda p: p[1:]}, "START must be there once each"),
    "no finish": ({"program": lambda p: p[:-1]}, "FINISH must be there once each for [0], not for []"),
    "finish before the end": ({"program": lambda p: moved(p, Op.FINISH, 0, 3)}, "FINISH must be the last instruction"),
    "division twice": ({"program": lambda p: np.vstack([[[Op.ATTEND, 0]], p])}, "ATTEND must be there once each"),
    "wait before start": (
        {"program": lambda p: moved(p, Op.WAIT, 1, 0)},
        "exchange 1 is completed before it is started",
    ),
    "reduce before wait": ({"program": lambda p: moved(p, Op.REDUCE, 6, 0)}, "exchange 6 is reduced before it is"),
    "no reduce": ({"program": lambda p: p[p[:, 0] != Op.REDUCE]}, "REDUCE must be there once each for ["),
}


@pytest.mark.parametrize("name", PASSES)
def test_passes(plan: Plan, name: str) -> None:
    edits, words = PASSES[name]
    refused(plan, with_pass(plan.rank_plans, 1, "backward", **edits), words)
    with pytest.raises(PlanError, match="^rank 1, backward: "):
        check(plan.batch, with_pass(plan.rank_plans, 1, "backward", **edits))
