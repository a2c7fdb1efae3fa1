"""Ways to damage plans, one at a time: every damaged plan must fail the check it is made for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hf_dcp import masks
from hf_dcp.config import DcpConfig
from hf_dcp.planning import BatchSpec, ModelShape, Plan, RankPlan, Topology, plan_batch
from hf_dcp.planning.plan import Message, Op, PassPlan, WindowPlan
from tests.planning.solvers import random_solver

Plans = list[RankPlan]


def a_plan(**settings: object) -> Plan:
    """Two nodes of two ranks, rows of both sides that a gateway passes on, full and masked items."""
    batch = BatchSpec([61, 30, 3], [masks.causal(), masks.lambda_mask(2, 7), masks.full()])
    shape = ModelShape(4, 2, 4, "fp32", windows=((None, 1), (9, 2)))

    def solve(problem, config):
        wild = random_solver(3)(problem, config)
        everywhere = np.arange(len(problem.blocks), dtype=np.int32) % 4
        return replace(wild, block_device=everywhere)

    return plan_batch(batch, Topology.grid(2, 2), shape, DcpConfig(block_size=8, **settings), solver=solve)


def with_part(plans: Plans, rank: int, change: Callable[[WindowPlan], WindowPlan]) -> Plans:
    """The plans with another first window of this rank."""
    result = list(plans)
    first, *others = plans[rank].windows
    result[rank] = replace(plans[rank], windows=(change(first), *others))
    return result


def with_arrays(plans: Plans, rank: int, **edits: Callable[[np.ndarray], np.ndarray]) -> Plans:
    """The plans with edited arrays of this rank's first window."""
    return with_part(plans, rank, lambda part: replace(part, **_edited(part, edits)))


def with_pass(plans: Plans, rank: int, which: str, **edits: Callable[[np.ndarray], np.ndarray]) -> Plans:
    """The plans with edited arrays of one pass of this rank's first window."""

    def change(part: WindowPlan) -> WindowPlan:
        one = getattr(part, which)
        return replace(part, **{which: replace(one, **_edited(one, edits))})

    return with_part(plans, rank, change)


def _edited(owner: object, edits: dict[str, Callable[[np.ndarray], np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: edit(getattr(owner, name).copy()) for name, edit in edits.items()}


def put(index: object, value: object) -> Callable[[np.ndarray], np.ndarray]:
    """An edit: set elements."""

    def edit(array: np.ndarray) -> np.ndarray:
        array[index] = value
        return array

    return edit


def add(index: object, value: object) -> Callable[[np.ndarray], np.ndarray]:
    """An edit: add to elements."""

    def edit(array: np.ndarray) -> np.ndarray:
        array[index] += value
        return array

    return edit


@dataclass
class Mail:
    """A message with its runs, easy to change."""

    exchange: int
    partial: int
    incoming: int
    peer: int
    q: list[list[int]] = field(default_factory=list)
    kv: list[list[int]] = field(default_factory=list)


def mails(one: PassPlan) -> list[Mail]:
    return [
        Mail(
            m[Message.EXCHANGE],
            m[Message.PARTIAL],
            m[Message.INCOMING],
            m[Message.PEER],
            one.q_runs[m[Message.Q_BEGIN] : m[Message.Q_END]].tolist(),
            one.kv_runs[m[Message.KV_BEGIN] : m[Message.KV_END]].tolist(),
        )
        for m in one.messages.tolist()
    ]


def with_mails(plans: Plans, rank: int, which: str, edited: Sequence[Mail], program: bool = True) -> Plans:
    """The plans with other messages in one pass of this rank, its program without exchanges that have become empty."""
    ordered = sorted(edited, key=lambda m: (m.exchange, m.partial, m.incoming, m.peer))
    table = np.zeros((len(ordered), len(Message)), np.int32)
    for row, m in zip(table, ordered):
        row[:4] = m.exchange, m.peer, m.incoming, m.partial
    for column, name in ((Message.Q_BEGIN, "q"), (Message.KV_BEGIN, "kv")):
        ends = np.cumsum([len(getattr(m, name)) for m in ordered])
        table[:, column + 1] = ends
        table[1:, column] = ends[:-1]
    runs = {
        f"{name}_runs": np.array([run for m in ordered for run in getattr(m, name)], np.int32).reshape(-1, 2)
        for name in ("q", "kv")
    }
    kept = {m.exchange for m in ordered}
    reduced = {m.exchange for m in ordered if m.partial and m.incoming}

    def change(part: WindowPlan) -> WindowPlan:
        one = getattr(part, which)
        lines = [
            (op, x)
            for op, x in one.program.tolist()
            if (op not in (Op.START, Op.WAIT) or x in kept) and (op != Op.REDUCE or x in reduced)
        ]
        new_program = np.array(lines, np.int32) if program else one.program
        return replace(part, **{which: replace(one, messages=table, program=new_program, **runs)})

    return with_part(plans, rank, change)


def both_ends(plans: Plans, which: str, wanted: Callable[[int, Mail], bool]) -> tuple[tuple[int, int], tuple[int, int]]:
    """(rank, index) of the first outgoing message that is wanted, and of its other end."""
    for rank, plan in enumerate(plans):
        for i, mail in enumerate(mails(getattr(plan.windows[0], which))):
            if not mail.incoming and wanted(rank, mail):
                others = mails(getattr(plans[mail.peer].windows[0], which))
                key = (mail.exchange, mail.partial, 1, rank)
                j = [(m.exchange, m.partial, m.incoming, m.peer) for m in others].index(key)
                return (rank, i), (mail.peer, j)
    raise LookupError("no such message")


def edit_mail(plans: Plans, which: str, end: tuple[int, int], change: Callable[[Mail], Mail | None]) -> Plans:
    """The plans with one changed message; None removes it."""
    rank, index = end
    all_mails = mails(getattr(plans[rank].windows[0], which))
    changed = change(all_mails[index])
    rest = all_mails[:index] + all_mails[index + 1 :]
    return with_mails(plans, rank, which, rest + ([changed] if changed else []))


def moved(program: np.ndarray, op: Op, argument: int, place: int) -> np.ndarray:
    """The program with one instruction moved to ``place``."""
    lines = [tuple(line) for line in program.tolist()]
    lines.remove((op, argument))
    lines.insert(place, (op, argument))
    return np.array(lines, np.int32)
