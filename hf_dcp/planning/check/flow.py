"""Whether rows are where they are needed when they are needed, and every contribution reaches its owner once.

All programs are executed on fingerprints in place of tensors (see `hf_dcp.planning.check.coverage`): a row's partial
result is the fingerprint of the pairs that have gone into it. Sums of fingerprints behave as sums of gradients and
merges of outputs do, so that what an owner has in the end tells whether all contributions came, and came once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numba as nb
import numpy as np

from hf_dcp.planning.check.coverage import Expected, Fingerprints, attend
from hf_dcp.planning.check.error import PlanError
from hf_dcp.planning.check.rows import SIDES, Slots
from hf_dcp.planning.lockstep import DeadlockError, walk_in_lockstep
from hf_dcp.planning.plan import Item, Message, Op, PassPlan, WindowPlan


@dataclass
class Journey:
    """What happened to the rows of one side of one rank, by slot."""

    present: np.ndarray
    """bool: the inputs are there."""
    sums: np.ndarray
    """uint64: fingerprint of what has gone into the partial result."""
    source: np.ndarray
    """int32: the rank that the inputs came from; -1 for own rows."""
    target: np.ndarray
    """int32: the rank that the partial result went to; -1 if to none."""
    last: np.ndarray
    """int32: the row's place in the message that had it last; scratch space."""

    @classmethod
    def of(cls, slots: Slots) -> Journey:
        none = np.full(len(slots), -1, np.int32)
        return cls(np.arange(len(slots)) < slots.own, np.zeros(len(slots), np.uint64), none, none.copy(), none.copy())


@dataclass(frozen=True)
class _Runs:
    """The runs of all messages of one side of one rank, row by row."""

    slots: np.ndarray
    """int32[rows]"""
    ptr: np.ndarray
    """int64[runs + 1]: the rows of each run."""

    @classmethod
    def of(cls, slots: Slots, runs: np.ndarray) -> _Runs:
        return cls(slots.expand(runs).astype(np.int32), np.append(0, np.cumsum(runs[:, 1], dtype=np.int64)))


@dataclass(frozen=True)
class _Rows:
    """Rows of one side in a message."""

    token: np.ndarray
    group: np.ndarray
    sums: np.ndarray


@dataclass
class Flow:
    """All ranks' programs of one pass, executed on fingerprints."""

    parts: Sequence[WindowPlan]
    passes: Sequence[PassPlan]
    sides: Sequence[tuple[Slots, Slots]]
    """Slots of Q and of KV rows, by rank."""
    prints: Fingerprints
    kv_partials: bool
    """Whether KV rows have partial results: in backward."""
    minimal: bool
    """Whether partial results must go home at once, from where they were made: not around a ring."""
    where: str
    journeys: list[tuple[Journey, Journey]] = field(init=False)
    rows: list[list[_Runs]] = field(init=False)
    """By rank and side."""
    mail: dict[tuple[int, int, int, int], list[_Rows]] = field(init=False, default_factory=dict)
    """(exchange, partial, sender, receiver) -> rows of both sides."""

    def __post_init__(self) -> None:
        self.journeys = [(Journey.of(q), Journey.of(kv)) for q, kv in self.sides]
        self.rows = [
            [_Runs.of(slots, runs) for slots, runs in zip(sides, (one.q_runs, one.kv_runs))]
            for sides, one in zip(self.sides, self.passes)
        ]

    def run(self) -> None:
        """Raises PlanError at the first instruction that can't be executed."""
        steps = {Op.START: self._start, Op.WAIT: self._wait, Op.ATTEND: self._attend, Op.REDUCE: self._reduce}
        try:
            walk_in_lockstep(self.passes, lambda rank, op, argument: steps.get(op, self._finish)(rank, argument))
        except DeadlockError as error:
            raise PlanError(f"{self.where}: {error}") from error

    def require_results(self, expected: Expected) -> None:
        """Require the final results of all owners to hold every contribution once."""
        for rank, (slots, journeys) in enumerate(zip(self.sides, self.journeys)):
            for side in range(2 if self.kv_partials else 1):
                own = slice(0, slots[side].own)
                wanted = (expected.q, expected.kv)[side][slots[side].token[own]]
                wrong = np.flatnonzero(journeys[side].sums[own] != wanted)
                self._refuse(wrong, rank, side, "its own, lacks partial results of other ranks or has some twice")

    def _messages(self, rank: int, exchange: int, incoming: int) -> np.ndarray:
        table = self.passes[rank].messages
        return table[(table[:, Message.EXCHANGE] == exchange) & (table[:, Message.INCOMING] == incoming)]

    def _slots(self, rank: int, message: np.ndarray) -> list[np.ndarray]:
        """Slots of a message's rows, of Q and of KV."""
        q, kv = self.rows[rank]
        begin, end = message[[Message.Q_BEGIN, Message.KV_BEGIN]], message[[Message.Q_END, Message.KV_END]]
        return [runs.slots[runs.ptr[b] : runs.ptr[e]] for runs, b, e in zip((q, kv), begin, end)]

    def _start(self, rank: int, exchange: int) -> None:
        for message in self._messages(rank, exchange, incoming=0):
            peer, partial = int(message[Message.PEER]), int(message[Message.PARTIAL])
            rows = []
            for side, slots in enumerate(self._slots(rank, message)):
                known, journey = self.sides[rank][side], self.journeys[rank][side]
                self._require_distinct(slots, rank, side)
                if partial:
                    self._leave(rank, side, slots, peer)
                else:
                    late = slots[~journey.present[slots]]
                    self._refuse(late, rank, side, f"is sent to rank {peer} in exchange {exchange} before it is there")
                rows.append(_Rows(known.token[slots], known.group[slots], journey.sums[slots] if partial else slots))
            self.mail[exchange, partial, rank, peer] = rows

    def _leave(self, rank: int, side: int, slots: np.ndarray, peer: int) -> None:
        """Partial results leave."""
        journey, known = self.journeys[rank][side], self.sides[rank][side]
        if side == 1 and not self.kv_partials:
            self._refuse(slots, rank, side, "has no partial result in this pass, but one is sent")
        if self.minimal:
            self._refuse(slots[slots < known.own], rank, side, "is the rank's own, but its result is sent away")
            self._refuse(slots[journey.target[slots] >= 0], rank, side, "has a partial result that is sent twice")
        journey.target[slots] = peer

    def _require_distinct(self, slots: np.ndarray, rank: int, side: int) -> None:
        number = np.arange(len(slots), dtype=np.int32)
        last = self.journeys[rank][side].last
        last[slots] = number
        self._refuse(slots[last[slots] != number], rank, side, "is twice in one message")

    def _wait(self, rank: int, exchange: int) -> None:
        for message in self._messages(rank, exchange, incoming=1):
            peer, partial = int(message[Message.PEER]), int(message[Message.PARTIAL])
            sent = self.mail[exchange, partial, peer, rank]
            for side, slots in enumerate(self._slots(rank, message)):
                known, journey = self.sides[rank][side], self.journeys[rank][side]
                same = np.array_equal(known.token[slots], sent[side].token)
                if not same or not np.array_equal(known.group[slots], sent[side].group):
                    raise PlanError(
                        f"{self.where}: ranks {peer} and {rank} disagree on the {SIDES[side]} rows of their message in "
                        f"exchange {exchange}"
                    )
                if not partial:
                    twice = slots[journey.present[slots]]
                    self._refuse(twice, rank, side, f"is received from rank {peer} though it is there already")
                    journey.present[slots], journey.source[slots] = True, peer

    def _reduce(self, rank: int, exchange: int) -> None:
        for message in self._messages(rank, exchange, incoming=1):
            if message[Message.PARTIAL]:
                sent = self.mail[exchange, 1, int(message[Message.PEER]), rank]
                for side, slots in enumerate(self._slots(rank, message)):
                    self.journeys[rank][side].sums[slots] += sent[side].sums

    def _attend(self, rank: int, division: int) -> None:
        one, part, sides = self.passes[rank], self.parts[rank], self.sides[rank]
        items = part.items[one.order[one.divisions[division] : one.divisions[division + 1]]]
        for side, (first, count) in enumerate(((Item.Q_SLOT, Item.Q_COUNT), (Item.KV_SLOT, Item.KV_COUNT))):
            steps = sides[side].step(items[:, first])
            absent = _first_absent(items[:, first], items[:, count], steps, self.journeys[rank][side].present)
            late = [absent] if absent >= 0 else []
            self._refuse(late, rank, side, f"is used in division {division} before it is there")
        attend(items, part.slices, sides, self.prints, [journey.sums for journey in self.journeys[rank]])

    def _finish(self, rank: int, _: int) -> None:
        for side, journey in enumerate(self.journeys[rank]):
            self._refuse(np.flatnonzero(~journey.present), rank, side, "never arrives")

    def _refuse(self, slots: np.ndarray | list[int], rank: int, side: int, what: str) -> None:
        """Raise PlanError about the first of these slots, if there is one."""
        if len(slots):
            raise PlanError(f"{self.where}: rank {rank}: {self.sides[rank][side].describe(slots[0], side)}, {what}")


@nb.njit(cache=True)
def _first_absent(first, count, step, present):
    """The first slot of these runs that isn't present, or -1."""
    for i in range(len(first)):
        for r in range(count[i]):
            slot = first[i] + r * step[i]
            if not present[slot]:
                return slot
    return -1
