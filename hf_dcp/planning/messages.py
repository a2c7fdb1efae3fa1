"""Messages: which rows travel in which exchange, as every rank sees it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from hf_dcp.planning.plan import Message, Op, PassPlan
from hf_dcp.planning.timeline import completed_in, started_in
from hf_dcp.planning.uses import LocalRows, Uses


@dataclass(frozen=True)
class Timing:
    """In which exchange the rows of every use arrive, and in which their partial results leave."""

    arrive: np.ndarray
    """int64[uses]"""
    leave: np.ndarray
    """int64[uses]"""


@dataclass(frozen=True)
class _Rows:
    """Runs of rows in messages, one entry for each end of each transfer; sorted by `_sorted`."""

    rank: np.ndarray
    message: np.ndarray
    """Packed (exchange, partial, incoming, peer); ascending for each rank."""
    kv: np.ndarray
    group: np.ndarray
    token: np.ndarray
    slot: np.ndarray
    count: np.ndarray


def pass_tables(
    q: Uses, kv: Uses, timings: tuple[Timing, Timing], kv_partials: bool, local: LocalRows, groups: int
) -> list[dict[str, np.ndarray]]:
    """The arrays ``messages``, ``q_runs`` and ``kv_runs`` of every rank, for one pass.

    Args:
        timings: of Q rows and of KV rows.
        kv_partials: whether KV rows have partial results (backward).
    """
    world = len(local.count)
    parts = []
    for side, (uses, timing) in enumerate(zip((q, kv), timings, strict=True)):
        common = (side, uses.group, uses.token, uses.count)
        parts += both_ends(world, timing.arrive, 0, uses.source, uses.source_slot, uses.device, uses.slot, common)
        if side == 0 or kv_partials:
            parts += both_ends(world, timing.leave, 1, uses.device, uses.slot, uses.source, uses.source_slot, common)
    return message_tables(parts, local.count, groups)


def message_tables(parts: list[tuple], local_tokens: np.ndarray, groups: int) -> list[dict[str, np.ndarray]]:
    """The message arrays of every rank.

    Args:
        parts: of `both_ends`, all transfers of one pass.
        local_tokens: int64[world_size], tokens of every rank.
    """
    rows = _sorted(_Rows(*(np.concatenate(columns) for columns in zip(*parts, strict=True))))
    return _split(_joined(rows, local_tokens * groups, groups), len(local_tokens))


def both_ends(world, exchange, partial, sender, sender_slot, receiver, receiver_slot, common):
    """The two entries of every transfer, for `message_tables`; all arguments from ``exchange`` on by transfer.

    Args:
        common: (side, group, token, count); side 0 is Q, 1 is KV.
    """
    side, group, token, count = common
    result = []
    for incoming, rank, slot, peer in ((0, sender, sender_slot, receiver), (1, receiver, receiver_slot, sender)):
        message = ((exchange.astype(np.int64) * 2 + partial) * 2 + incoming) * world + peer
        result.append((rank.astype(np.int64), message, np.full(len(rank), side), group, token, slot, count))
    return result


def _sorted(rows: _Rows) -> _Rows:
    """By rank, message, side, group, token: both ends of a message list their rows in the same order."""
    order = np.lexsort((rows.token, rows.group, rows.kv, rows.message, rows.rank))
    return _take(rows, order)


def _take(rows: _Rows, index: np.ndarray) -> _Rows:
    return _Rows(*(getattr(rows, name)[index] for name in _Rows.__dataclass_fields__))


def _joined(rows: _Rows, local_slots: np.ndarray, groups: int) -> _Rows:
    """Join runs of neighbouring tokens in neighbouring slots."""
    if not len(rows.rank):
        return rows
    step = np.where(rows.slot < local_slots[rows.rank], groups, 1)
    goes_on = np.zeros(len(rows.rank), bool)
    goes_on[1:] = rows.token[1:] == rows.token[:-1] + rows.count[:-1]
    goes_on[1:] &= rows.slot[1:] == rows.slot[:-1] + rows.count[:-1] * step[:-1]
    goes_on[1:] &= step[1:] == step[:-1]
    for column in (rows.rank, rows.message, rows.kv, rows.group):
        goes_on[1:] &= column[1:] == column[:-1]
    first = np.flatnonzero(~goes_on)
    count = np.add.reduceat(rows.count, first)
    taken = _take(rows, first)
    return _Rows(taken.rank, taken.message, taken.kv, taken.group, taken.token, taken.slot, count)


def _split(rows: _Rows, world: int) -> list[dict[str, np.ndarray]]:
    begins = np.searchsorted(rows.rank, np.arange(world + 1))
    runs = np.stack([rows.slot, rows.count], 1).astype(np.int32)
    tables = []
    for rank in range(world):
        own = slice(begins[rank], begins[rank + 1])
        message, kv = rows.message[own], rows.kv[own] == 1
        starts = np.flatnonzero(np.append(True, message[1:] != message[:-1])) if len(message) else np.zeros(0, np.int64)
        table = np.zeros((len(starts), len(Message)), np.int32)
        packed = message[starts]
        table[:, Message.PEER] = packed % world
        table[:, Message.INCOMING] = packed // world % 2
        table[:, Message.PARTIAL] = packed // (world * 2) % 2
        table[:, Message.EXCHANGE] = packed // (world * 4)
        ends = np.append(starts[1:], len(message))
        for begin_column, before in ((Message.Q_BEGIN, ~kv), (Message.KV_BEGIN, kv)):
            seen = np.concatenate([[0], np.cumsum(before)])
            table[:, begin_column] = seen[starts]
            table[:, begin_column + 1] = seen[ends]
        tables.append({"messages": table, "q_runs": runs[own][~kv], "kv_runs": runs[own][kv]})
    return tables


def make_pass(table: dict[str, np.ndarray], item_phase: np.ndarray) -> PassPlan:
    """The program of one rank: in every phase start exchanges, compute its division, complete exchanges.

    Args:
        table: what `pass_tables` made for this rank.
        item_phase: int32[items] of this rank, in the order of its item table.
    """
    order = np.argsort(item_phase, kind="stable").astype(np.int32)
    ordered = item_phase[order]
    first = np.flatnonzero(np.diff(ordered, prepend=-1))
    messages = table["messages"]
    exchanges = sorted(set(messages[:, Message.EXCHANGE].tolist()))
    reduces = set(messages[(messages[:, Message.PARTIAL] == 1) & (messages[:, Message.INCOMING] == 1), 0].tolist())
    steps: dict[int, tuple[list, list, list]] = defaultdict(lambda: ([], [], []))
    for division, p in enumerate(ordered[first].tolist()):
        steps[p][1].append((Op.ATTEND, division))
    for x in exchanges:
        steps[started_in(x)][0].append((Op.START, x))
        steps[completed_in(x)][2].extend([(Op.WAIT, x), (Op.REDUCE, x)] if x in reduces else [(Op.WAIT, x)])
    program = [step for p in sorted(steps) for part in steps[p] for step in part]
    program.append((Op.FINISH, 0))
    return PassPlan(
        program=np.array(program, np.int32),
        order=order,
        divisions=np.append(first, len(order)).astype(np.int32),
        **table,
    )
