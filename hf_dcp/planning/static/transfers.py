"""What a static scheme sends: the steps of its rings as messages and programs.

**Exchanges.** Teams swap tokens for heads in exchange `Numbers.gather`, before anything is computed. Then step t of
the ring computes division t while exchange ``ring(t)`` brings the KV of step t + 1. A double ring sends KV to the next
inner ring behind a whole inner ring's steps, in an exchange of its own. Teams return what belongs to their members in
`Numbers.scatter`, when everything is computed.

**dKV** makes as many hops as a ring has positions. It follows its KV one step behind: what is computed in step t leaves
in exchange ring(t + 1) for the position of step t + 1, which adds its own part, and at last it comes home. The hop that
leaves home carries zeros, in exchange ring(0): the owner's own part waits there in its accumulator, in full precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hf_dcp.planning.messages import both_ends, message_tables
from hf_dcp.planning.plan import Message, Op, PassPlan
from hf_dcp.planning.static.layout import Grid
from hf_dcp.planning.static.rows import KV, DenseRows, Q


@dataclass(frozen=True)
class Numbers:
    """How a grid numbers its exchanges; those without messages don't appear in programs."""

    grid: Grid

    gather = 0

    def ring(self, step: int) -> int:
        return 1 + step

    @property
    def scatter(self) -> int:
        return self.grid.positions + 2

    def outer(self, step: int) -> int:
        """Sent in this step, the first of an inner ring; in use one inner ring later."""
        return self.grid.positions + 3 + step // self.grid.inner


def message_arrays(rows: DenseRows, which: str) -> list[dict[str, np.ndarray]]:
    """``messages``, ``q_runs`` and ``kv_runs`` of every rank for ``which`` pass."""
    builder = _Transfers(rows, Numbers(rows.grid))
    backward = which == "backward"
    builder.teams(backward)
    builder.kv_ring()
    if backward:
        builder.dkv_ring()
    return message_tables(builder.parts, rows.local.count, rows.groups)


class _Transfers:
    def __init__(self, rows: DenseRows, numbers: Numbers) -> None:
        self.rows, self.grid, self.numbers = rows, rows.grid, numbers
        nothing = np.zeros(0, np.int64)
        self.parts: list[tuple] = []
        self._send(KV, 0, 0, nothing, nothing, nothing)  # tables of no transfer at all have columns too

    def teams(self, backward: bool) -> None:
        """Rows of every block to the members of its team, and the partial results back."""
        for member in range(self.grid.team):
            there = self.grid.ranks[self.rows.position, member]
            block = np.flatnonzero(there != self.rows.local.device)
            there, owner = there[block], self.rows.local.device[block]
            for side in (Q, KV):
                self._send(side, self.numbers.gather, 0, owner, there, block)
                if side == Q or backward:
                    self._send(side, self.numbers.scatter, 1, there, owner, block)

    def kv_ring(self) -> None:
        for source, target in self.grid.hops():
            number = self.numbers.ring(source) if target % self.grid.inner else self.numbers.outer(source)
            self._hop(number, 0, source, target)

    def dkv_ring(self) -> None:
        for step, target in self.grid.return_hops():
            self._hop(self.numbers.ring(target if step else 0), 1, step, target)

    def _hop(self, exchange: int, partial: int, source: int, target: int) -> None:
        """All blocks, for every member of a team, from the position of one step to that of another."""
        block = np.arange(len(self.rows.blocks))
        ends = [self.grid.walk(self.rows.position, step) for step in (source, target)]
        for member in range(self.grid.team):
            sender, receiver = (self.grid.ranks[end, member] for end in ends)
            self._send(KV, exchange, partial, sender, receiver, block)

    def _send(
        self, side: int, exchange: int, partial: int, sender: np.ndarray, receiver: np.ndarray, block: np.ndarray
    ) -> None:
        """All rows of every block, from one rank to another."""
        rows, grid = self.rows, self.grid
        # the group is that of whichever end is not the owner; between two members of a ring both have the same
        owner = rows.local.device[block]
        group = grid.index[np.where(sender == owner, receiver, sender), 1].astype(np.int64)
        slots = [rows.slot(side, end.astype(np.int64), block, group) for end in (sender, receiver)]
        common = (side, group, rows.blocks.start[block], rows.blocks.size[block])
        number = np.full(len(block), exchange, np.int64)
        world = len(rows.local.count)
        self.parts += both_ends(world, number, partial, sender, slots[0], receiver, slots[1], common)


def make_program(numbers: Numbers, table: dict[str, np.ndarray], item_step: np.ndarray) -> PassPlan:
    """The program of one rank: the exchanges and divisions of the ring, step by step.

    Args:
        table: of `message_arrays`, for this rank.
        item_step: int32[items], the step that computes each item of this rank.
    """
    grid, messages = numbers.grid, table["messages"]
    order = np.argsort(item_step, kind="stable").astype(np.int32)
    steps, first = np.unique(item_step[order], return_index=True)
    division = {int(step): d for d, step in enumerate(steps)}
    program = _Program(messages)
    program.start(numbers.gather)
    program.wait(numbers.gather)
    for step in range(grid.positions + 1):
        program.start(numbers.ring(step))
        program.start(numbers.outer(step), step % grid.inner == 0)
        if step in division:
            program.lines.append((Op.ATTEND, division[step]))
        program.wait(numbers.ring(step))
        program.wait(numbers.outer(step), step % grid.inner == grid.inner - 1)
    program.start(numbers.scatter)
    program.wait(numbers.scatter)
    program.lines.append((Op.FINISH, 0))
    divisions = np.append(first, len(order)).astype(np.int32)
    return PassPlan(np.array(program.lines, np.int32), order, divisions, **table)


class _Program:
    """Instructions of one rank; exchanges that it has no message in are left out."""

    def __init__(self, messages: np.ndarray) -> None:
        self.lines: list[tuple[int, int]] = []
        self.exchanges = set(messages[:, Message.EXCHANGE].tolist())
        partial = (messages[:, Message.PARTIAL] == 1) & (messages[:, Message.INCOMING] == 1)
        self.reduces = set(messages[partial, Message.EXCHANGE].tolist())

    def start(self, exchange: int, now: bool = True) -> None:
        if now and exchange in self.exchanges:
            self.lines.append((Op.START, exchange))

    def wait(self, exchange: int, now: bool = True) -> None:
        if now and exchange in self.exchanges:
            self.lines.append((Op.WAIT, exchange))
            if exchange in self.reduces:
                self.lines.append((Op.REDUCE, exchange))
