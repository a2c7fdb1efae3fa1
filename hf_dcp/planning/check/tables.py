"""Whether the tables of rank plans are well formed: items, slices, messages, programs. Not what they compute."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_dcp.planning.batch import BatchSpec
from hf_dcp.planning.check.error import PlanError, require
from hf_dcp.planning.check.rows import SIDES, Slots
from hf_dcp.planning.plan import Item, Message, Op, PassPlan, RankPlan, Slice, WindowPlan


def require_agreement(batch: BatchSpec, rank_plans: Sequence[RankPlan]) -> None:
    """Require the plans to be those of ranks 0, 1, 2, ... of one group, for this batch."""
    require(len(rank_plans) > 0, "there is no rank plan")
    first = rank_plans[0]
    tokens, ranks = batch.num_tokens, len(rank_plans)
    require(first.num_tokens == tokens, f"the plan is for {first.num_tokens} tokens, but the batch has {tokens}")
    require(ranks == first.world_size, f"there are {ranks} rank plans for a group of {first.world_size} ranks")
    for rank, plan in enumerate(rank_plans):
        require(plan.rank == rank, f"the plan of rank {rank} says that it is that of rank {plan.rank}")
        for name in ("node_of_rank", "digest", "num_tokens", "shape", "head_groups", "reduce_dtype"):
            require(getattr(plan, name) == getattr(first, name), f"{name} of rank {rank} differs from that of rank 0")
        windows = [part.window for part in plan.windows]
        named = [window for window, _ in plan.shape.windows]
        require(windows == named, f"rank {rank} has parts for the windows {windows}, but the model has {named}")


def require_items(part: WindowPlan, sides: tuple[Slots, Slots], where: str) -> None:
    """Require the items to be runs of rows of one head group, and their slices to be slices."""
    items, slices = part.items.astype(np.int64), part.slices.astype(np.int64)
    require(items.ndim == 2 and items.shape[1] == len(Item), f"{where}: items must have {len(Item)} columns")
    require(slices.ndim == 2 and slices.shape[1] == len(Slice), f"{where}: slices must have {len(Slice)} columns")
    for side, (slot, count, token) in enumerate(
        ((Item.Q_SLOT, Item.Q_COUNT, Item.Q_TOKEN), (Item.KV_SLOT, Item.KV_COUNT, Item.KV_TOKEN))
    ):
        sides[side].require_runs(items[:, slot], items[:, count], f"{where}: the {SIDES[side]} rows of an item")
        same = sides[side].token[items[:, slot]] == items[:, token]
        require(same.all(), f"{where}: the {SIDES[side]} slot of an item holds another token than the item says")
    groups = [sides[side].group[items[:, slot]] for side, slot in ((0, Item.Q_SLOT), (1, Item.KV_SLOT))]
    require((groups[0] == groups[1]).all(), f"{where}: an item has Q rows of one head group and KV rows of another")
    begin, end = items[:, Item.SLICE_BEGIN], items[:, Item.SLICE_END]
    known = (begin >= 0) & (begin <= end) & (end <= len(slices))
    require(known.all(), f"{where}: an item has slices that don't exist")
    slopes = slices[:, [Slice.LO_SLOPE, Slice.HI_SLOPE]]
    require(((slopes == 0) | (slopes == 1)).all(), f"{where}: slopes of slices must be 0 or 1")


def require_pass(one: PassPlan, num_items: int, sides: tuple[Slots, Slots], rank: int, world: int, where: str) -> None:
    """Require a program that computes every item once, and tables of messages that make sense by themselves."""
    once = np.array_equal(np.sort(one.order), np.arange(num_items))
    require(once, f"{where}: order must have every item exactly once")
    bounds = one.divisions
    whole = len(bounds) > 0 and bounds[0] == 0 and bounds[-1] == num_items and (np.diff(bounds) >= 0).all()
    require(whole, f"{where}: divisions must cut the order of items from its begin to its end")
    _require_messages(one, sides, rank, world, where)
    _require_program(one, where)


def _require_messages(one: PassPlan, sides: tuple[Slots, Slots], rank: int, world: int, where: str) -> None:
    table = one.messages.astype(np.int64)
    require(table.ndim == 2 and table.shape[1] == len(Message), f"{where}: messages must have {len(Message)} columns")
    peer, flags = table[:, Message.PEER], table[:, [Message.INCOMING, Message.PARTIAL]]
    require(((peer >= 0) & (peer < world) & (peer != rank)).all(), f"{where}: a message has a peer that is none")
    require(((flags == 0) | (flags == 1)).all(), f"{where}: incoming and partial of messages must be 0 or 1")
    key = table[:, [Message.EXCHANGE, Message.PARTIAL, Message.INCOMING, Message.PEER]]
    order = np.lexsort(key.T[::-1])
    distinct = (np.diff(key[order], axis=0) != 0).any(1).all()
    ascending = distinct and np.array_equal(order, np.arange(len(key)))
    require(ascending, f"{where}: messages are not sorted, or one is double")
    columns = ((Message.Q_BEGIN, Message.Q_END), (Message.KV_BEGIN, Message.KV_END))
    for side, runs in enumerate((one.q_runs, one.kv_runs)):
        begin, end = table[:, columns[side][0]], table[:, columns[side][1]]
        chained = np.array_equal(np.append(begin, len(runs)), np.append(0, end)) and (begin <= end).all()
        require(chained, f"{where}: messages must share out the {SIDES[side]} runs in order")
        runs = runs.astype(np.int64)
        sides[side].require_runs(runs[:, 0], runs[:, 1], f"{where}: the {SIDES[side]} rows of a message")
    rows = table[:, Message.Q_END] - table[:, Message.Q_BEGIN] + table[:, Message.KV_END] - table[:, Message.KV_BEGIN]
    require((rows > 0).all(), f"{where}: a message has no rows")


def _require_program(one: PassPlan, where: str) -> None:
    table = one.messages
    exchanges = sorted(set(table[:, Message.EXCHANGE].tolist()))
    returns = (table[:, Message.PARTIAL] == 1) & (table[:, Message.INCOMING] == 1)
    expected = {
        Op.START: exchanges,
        Op.WAIT: exchanges,
        Op.REDUCE: sorted(set(table[returns, Message.EXCHANGE].tolist())),
        Op.ATTEND: list(range(len(one.divisions) - 1)),
        Op.FINISH: [0],
    }
    program = [tuple(instruction) for instruction in one.program.tolist()]
    place = {instruction: i for i, instruction in enumerate(program)}
    for op, arguments in expected.items():
        found = sorted(argument for code, argument in program if code == op)
        require(found == arguments, f"{where}: {op.name} must be there once each for {arguments}, not for {found}")
    if len(program) != sum(map(len, expected.values())):
        raise PlanError(f"{where}: the program has unknown instructions")
    require(program[-1] == (Op.FINISH, 0), f"{where}: FINISH must be the last instruction")
    for x in exchanges:
        require(place[Op.START, x] < place[Op.WAIT, x], f"{where}: exchange {x} is completed before it is started")
    for x in expected[Op.REDUCE]:
        require(place[Op.WAIT, x] < place[Op.REDUCE, x], f"{where}: exchange {x} is reduced before it is completed")


def require_matching(passes: Sequence[PassPlan], where: str) -> None:
    """Require every message to be known on both sides."""
    ends: tuple[set, set] = (set(), set())
    for rank, one in enumerate(passes):
        columns = one.messages[:, [Message.EXCHANGE, Message.PARTIAL, Message.PEER, Message.INCOMING]]
        for exchange, partial, peer, incoming in columns.tolist():
            ends[incoming].add((exchange, partial, *((peer, rank) if incoming else (rank, peer))))
    sent, awaited = ends
    for odd, what in ((sent - awaited, "sent but not received"), (awaited - sent, "awaited but not sent")):
        for exchange, partial, sender, receiver in sorted(odd)[:1]:
            rows = "partial results" if partial else "inputs"
            raise PlanError(f"{where}: the {rows} of exchange {exchange} from rank {sender} to {receiver} are {what}")
