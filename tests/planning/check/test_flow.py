"""Rows that come late, twice or never, results that get lost, and ranks that wait for ever, are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from hf_dcp import masks
from hf_dcp.planning import BatchSpec, Plan
from hf_dcp.planning.check import PlanError, check
from hf_dcp.planning.plan import Message, Op, PassPlan
from hf_dcp.rates import Rates
from tests.planning.check.corrupt import (
    Mail,
    Plans,
    a_plan,
    both_ends,
    edit_mail,
    mails,
    moved,
    with_mails,
    with_pass,
)

BOTH = pytest.mark.parametrize("which", ["forward", "backward"])


@pytest.fixture(scope="module")
def plan() -> Plan:
    return a_plan()


def refused(plan: Plan, plans: Plans, words: str, minimal: bool = True) -> None:
    with pytest.raises(PlanError) as error:
        check(plan.batch, plans, minimal=minimal)
    assert words in str(error.value) and "\n" not in str(error.value)


def change_both(plans: Plans, which: str, ends: tuple, change: Callable[[Mail], Mail | None]) -> Plans:
    for end in ends:
        plans = edit_mail(plans, which, end, change)
    return plans


def a_pass(plans: Plans, rank: int, which: str) -> PassPlan:
    return getattr(plans[rank].windows[0], which)


def q_inputs(rank: int, mail: Mail) -> bool:
    return not mail.partial and bool(mail.q)


def kv_inputs(rank: int, mail: Mail) -> bool:
    return not mail.partial and bool(mail.kv)


def q_partials(rank: int, mail: Mail) -> bool:
    return bool(mail.partial) and bool(mail.q)


def kv_partials(rank: int, mail: Mail) -> bool:
    return bool(mail.partial) and bool(mail.kv)


@BOTH
def test_a_message_is_known_at_one_end_only(plan: Plan, which: str) -> None:
    sender, receiver = both_ends(plan.rank_plans, which, q_inputs)
    where = f"{which}: the inputs of exchange 0 from rank {sender[0]} to {receiver[0]} are"
    refused(plan, edit_mail(plan.rank_plans, which, sender, lambda _: None), f"{where} awaited but not sent")
    refused(plan, edit_mail(plan.rank_plans, which, receiver, lambda _: None), f"{where} sent but not received")
    sender, _ = both_ends(plan.rank_plans, which, q_partials)
    number = mails(a_pass(plan.rank_plans, sender[0], which))[sender[1]].exchange
    words = f"the partial results of exchange {number} from rank {sender[0]}"
    refused(plan, edit_mail(plan.rank_plans, which, sender, lambda _: None), words)


@BOTH
@pytest.mark.parametrize("wanted", [q_inputs, kv_inputs])
def test_inputs_are_never_sent(plan: Plan, which: str, wanted: Callable) -> None:
    ends = both_ends(plan.rank_plans, which, wanted)
    refused(plan, change_both(plan.rank_plans, which, ends, lambda _: None), "before it is there")


def test_a_remote_row_never_arrives(plan: Plan) -> None:
    """With nothing computed there would be nobody to miss the row, but for the end of the program."""
    plans = list(plan.rank_plans)
    lonely = [replace(p, windows=tuple(_without_items(w) for w in p.windows)) for p in plans]
    nothing = BatchSpec(plan.batch.lengths, [masks.from_ranges(np.zeros((n, 1, 2), int)) for n in plan.batch.lengths])
    check(nothing, lonely, minimal=False)
    ends = both_ends(lonely, "forward", lambda rank, mail: not mail.partial and mail.exchange == 1)
    with pytest.raises(PlanError, match="row of token .* never arrives"):
        check(nothing, change_both(lonely, "forward", ends, lambda _: None), minimal=False)
    with pytest.raises(PlanError, match="but no item there needs it"):
        check(nothing, lonely)


def _without_items(part):
    passes = {name: _without_order(one) for name, one in part.passes()}
    return replace(part, items=part.items[:0], slices=part.slices[:0], **passes)


def _without_order(one: PassPlan) -> PassPlan:
    return replace(one, order=one.order[:0], divisions=np.zeros_like(one.divisions))


@BOTH
@pytest.mark.parametrize("wanted", [q_partials, kv_partials])
def test_partial_results_are_not_returned(plan: Plan, which: str, wanted: Callable) -> None:
    if which == "forward" and wanted is kv_partials:
        return
    ends = both_ends(plan.rank_plans, which, wanted)
    plans = change_both(plan.rank_plans, which, ends, lambda _: None)
    refused(plan, plans, "lacks partial results of other ranks or has some twice")
    refused(plan, plans, "lacks partial results of other ranks or has some twice", minimal=False)


@BOTH
@pytest.mark.parametrize("incoming", [0, 1])
def test_rows_of_a_message_are_swapped(plan: Plan, which: str, incoming: int) -> None:
    ends = both_ends(plan.rank_plans, which, lambda rank, mail: not mail.partial and len(mail.q) > 1)
    turned = edit_mail(plan.rank_plans, which, ends[incoming], lambda m: replace(m, q=m.q[::-1]))
    rank, peer = ends[0][0], ends[1][0]
    refused(plan, turned, f"{which}: ranks {rank} and {peer} disagree on the Q rows of their message in exchange")
    ends = both_ends(plan.rank_plans, "backward", lambda rank, mail: mail.partial and len(mail.kv) > 1)
    turned = edit_mail(plan.rank_plans, "backward", ends[incoming], lambda m: replace(m, kv=m.kv[::-1]))
    refused(plan, turned, "disagree on the KV rows of their message")
    both = change_both(plan.rank_plans, "backward", ends, lambda m: replace(m, kv=m.kv[::-1]))
    assert check(plan.batch, both) is None  # any order will do, if it is the same


@BOTH
def test_rows_are_repeated_in_a_message(plan: Plan, which: str) -> None:
    for wanted in (q_inputs, q_partials):
        ends = both_ends(plan.rank_plans, which, wanted)
        plans = change_both(plan.rank_plans, which, ends, lambda m: replace(m, q=[*m.q, m.q[0]]))
        refused(plan, plans, "is twice in one message")


def in_other_exchange(plans: Plans, which: str, wanted: Callable, exchange: int) -> Plans:
    """A message is sent a second time, in an exchange in which both ends have another message anyway."""
    sender, receiver = both_ends(plans, which, lambda rank, m: wanted(rank, m) and m.exchange != exchange)
    for rank, index in (sender, receiver):
        old = mails(a_pass(plans, rank, which))
        again = replace(old[index], exchange=exchange)
        key = (again.exchange, again.partial, again.incoming, again.peer)
        same = [m for m in old if (m.exchange, m.partial, m.incoming, m.peer) == key]
        joined = replace(again, q=[*same[0].q, *again.q], kv=[*same[0].kv, *again.kv])
        plans = with_mails(plans, rank, which, [m for m in old if m is not same[0]] + [joined])
    return plans


@BOTH
def test_inputs_are_sent_twice(plan: Plan, which: str) -> None:
    plans = in_other_exchange(plan.rank_plans, which, q_inputs, 1)
    refused(plan, plans, "is received from rank 0 though it is there already")


@BOTH
def test_partial_results_are_sent_twice(plan: Plan, which: str) -> None:
    plans = in_other_exchange(plan.rank_plans, which, q_partials, 6)
    refused(plan, plans, "has a partial result that is sent twice")
    refused(plan, plans, "lacks partial results of other ranks or has some twice", minimal=False)


def test_forward_has_no_partial_results_of_kv_rows(plan: Plan) -> None:
    ends = both_ends(plan.rank_plans, "forward", q_partials)
    rank, peer = ends[0][0], ends[1][0]
    back = [m for m in mails(a_pass(plan.rank_plans, rank, "forward")) if not m.partial and m.incoming and m.kv]
    there = next(m for m in back if m.peer == peer)
    far = next(
        m
        for m in mails(a_pass(plan.rank_plans, peer, "forward"))
        if (m.exchange, m.partial, m.incoming, m.peer) == (there.exchange, 0, 0, rank)
    )
    plans = edit_mail(plan.rank_plans, "forward", ends[0], lambda m: replace(m, kv=there.kv))
    plans = edit_mail(plans, "forward", ends[1], lambda m: replace(m, kv=far.kv))
    refused(plan, plans, "has no partial result in this pass, but one is sent")


def test_a_rank_sends_results_of_its_own_rows_away(plan: Plan) -> None:
    ends = both_ends(plan.rank_plans, "forward", q_inputs)
    own, remote = (mails(a_pass(plan.rank_plans, rank, "forward"))[i] for rank, i in ends)
    back = both_ends(
        plan.rank_plans, "forward", lambda rank, m: m.partial and (rank, m.peer) == (ends[0][0], ends[1][0])
    )
    plans = edit_mail(plan.rank_plans, "forward", back[0], lambda m: replace(m, q=[*m.q, *own.q]))
    plans = edit_mail(plans, "forward", back[1], lambda m: replace(m, q=[*m.q, *remote.q]))
    refused(plan, plans, "is the rank's own, but its result is sent away")


@BOTH
def test_a_division_is_computed_before_its_rows_arrive(plan: Plan, which: str) -> None:
    for rank in range(4):
        last = len(a_pass(plan.rank_plans, rank, which).divisions) - 2
        early = with_pass(plan.rank_plans, rank, which, program=lambda p, last=last: moved(p, Op.ATTEND, last, 0))
        refused(plan, early, f"{which}: rank {rank}: the ")
        refused(plan, early, f"is used in division {last} before it is there")


@BOTH
def test_a_gateway_passes_rows_on_before_it_has_them(plan: Plan, which: str) -> None:
    for rank in range(4):
        early = with_pass(plan.rank_plans, rank, which, program=lambda p: moved(p, Op.START, 2, 0))
        # the transport keeps the order of exchanges, so that all ranks must start this one early
        plans = early
        for other in range(4):
            if other != rank:
                plans = with_pass(plans, other, which, program=lambda p: moved(p, Op.START, 2, 0))
        refused(plan, plans, "is sent to rank ")
        refused(plan, plans, "in exchange 2 before it is there")


@BOTH
def test_partial_results_leave_before_they_are_complete(plan: Plan, which: str) -> None:
    """Partial results of the last division leave in the last but one exchange: computed after that, they are lost."""
    for rank in range(4):
        one = a_pass(plan.rank_plans, rank, which)
        program = moved(one.program, Op.ATTEND, len(one.divisions) - 2, len(one.program) - 2)
        late = with_pass(plan.rank_plans, rank, which, program=lambda _, new=program: new)
        refused(plan, late, "lacks partial results of other ranks or has some twice")
        refused(plan, late, "lacks partial results of other ranks or has some twice", minimal=False)


@BOTH
def test_a_gateway_returns_results_before_it_has_those_of_its_node(plan: Plan, which: str) -> None:
    for rank in range(4):
        one = a_pass(plan.rank_plans, rank, which)
        gets = one.messages[(one.messages[:, Message.PARTIAL] == 1) & (one.messages[:, Message.INCOMING] == 1)]
        first = int(gets[0, Message.EXCHANGE])
        program = moved(one.program, Op.REDUCE, first, len(one.program) - 2)
        late = with_pass(plan.rank_plans, rank, which, program=lambda _, new=program: new)
        relays = [m for m in mails(one) if m.partial and m.incoming and m.exchange == first and remote(plan, rank, m)]
        if relays:
            refused(plan, late, "lacks partial results of other ranks or has some twice")
        else:
            assert check(plan.batch, late) is None


def remote(plan: Plan, rank: int, mail: Mail) -> bool:
    own = plan.rank(rank).num_local * plan.head_groups
    return any(slot >= own for slot, _ in [*mail.q, *mail.kv])


@BOTH
def test_ranks_that_start_exchanges_in_another_order_wait_for_ever(which: str) -> None:
    slow = a_plan(hardware=Rates(1e7, 1e6, 1e7, 0.0, 0.0))  # worth several divisions

    def swapped(program: np.ndarray) -> np.ndarray:
        """Inputs for the second division (exchange 3) before those for the first (exchange 0)."""
        exchange = np.isin(program[:, 1], (0, 3)) & np.isin(program[:, 0], (Op.START, Op.WAIT))
        program[:, 1] = np.where(exchange, 3 - program[:, 1], program[:, 1])
        return program

    turned = with_pass(slow.rank_plans, 0, which, program=swapped)
    words = rf"{which}: ranks \[.*\] can't go on: rank 0 waits in exchange 3, .*, for ranks "
    with pytest.raises(PlanError, match=words):
        check(slow.batch, turned)
