"""Ranks that die or hang in the middle of a step: the others end in time, and name the rank and the division."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist

from hf_dcp.planning.planner import plan_batch
from hf_dcp.runtime import Communicator, DcpPlan, faults
from hf_dcp.runtime.cases import Case, Inputs
from hf_dcp.runtime.checks import executed
from hf_dcp.runtime.faults import find_silent
from tests.multiprocess import run_ranks
from tests.runtime.placements import random_placement

CASE = Case("causal", (150, 37), 16)
TIMEOUT = 5.0


class Group:
    """What `find_silent` wants of a process group."""

    def __init__(self, store: dist.Store | None) -> None:
        self.store = store

    def get_group_store(self) -> dist.Store:
        if self.store is None:
            raise RuntimeError("the host of the store is gone")
        return self.store


def silent(group: Group, call: int, rank: int, peer: int) -> list[int]:
    return find_silent(group, call, rank, peer)  # type: ignore[arg-type]


def test_the_rank_at_the_end_of_the_chain_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "GRACE_S", 0.1)
    group = Group(dist.HashStore())
    assert silent(group, 7, rank=0, peer=1) == [1]
    assert silent(group, 7, rank=2, peer=0) == [0, 1]
    assert silent(group, 7, rank=3, peer=2) == [2, 0, 1]
    assert silent(group, 8, rank=3, peer=2) == [2], "reports of other calls don't count"
    assert silent(group, 7, rank=1, peer=3) == [3, 2, 0], "a circle ends"
    assert silent(Group(None), 7, rank=2, peer=0) == [0], "without a store there is the peer"


def test_a_report_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "GRACE_S", 1.0)

    class Late(dist.HashStore):  # type: ignore[misc]
        asked = 0

        def check(self, keys: list[str]) -> bool:
            self.asked += 1
            if self.asked == 3:
                self.set(keys[0], "2")
            return super().check(keys)

    assert silent(Group(Late()), 1, rank=0, peer=1) == [1, 2]


def broken_step(how: str, which: str) -> Any:
    """Rank 1 dies or hangs in the middle of the second step."""
    communicator = Communicator.create()
    plan = plan_batch(CASE.batch, CASE.topology(3), CASE.shape(), CASE.config(), solver=random_placement(1))
    own = DcpPlan(plan.rank(communicator.rank))
    inputs = Inputs.of(CASE)
    executed(CASE, inputs, own)
    if communicator.rank == 1:
        left = [3]

        def record(current: str, *_: Any) -> None:
            left[0] -= current == which
            if left[0] == 0 and how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            elif left[0] == 0:
                time.sleep(4 * TIMEOUT)

        own.executor.record = record
    begin = time.monotonic()
    try:
        executed(CASE, inputs, own)
    except RuntimeError as error:
        return [time.monotonic() - begin, str(error)]
    return [time.monotonic() - begin, "no error"]


@pytest.mark.parametrize(
    ("how", "which"),
    [
        ("dies", "backward"),
        pytest.param("dies", "forward", marks=pytest.mark.slow),
        pytest.param("hangs", "forward", marks=pytest.mark.slow),
        pytest.param("hangs", "backward", marks=pytest.mark.slow),
    ],
)
def test_all_others_name_the_rank_and_the_division(how: str, which: str) -> None:
    answers = run_ranks(broken_step, 3, how, which, group_timeout=TIMEOUT, expect_failure=True, timeout=60.0)
    assert answers[1] is None or how == "hangs"
    for rank in (0, 2):
        seconds, text = answers[rank]
        assert f"of {which} on rank {rank}" in text and "division" in text
        assert "rank 1 of the group (global rank 1) is gone, or did not answer within the group's time-out" in text
        assert seconds < TIMEOUT + faults.GRACE_S + 3


def longer_message() -> str:
    """Rank 1 expects less than rank 0 sends."""
    communicator = Communicator.create()
    plan = plan_batch(CASE.batch, CASE.topology(2), CASE.shape(), CASE.config(), solver=random_placement(1))
    own = DcpPlan(plan.rank(communicator.rank))
    if communicator.rank == 1:
        messages = own.executor.prepared(None, "forward").messages.by_exchange
        shorten(next(m for exchange in messages.values() for m in exchange if m.incoming))
    try:
        executed(CASE, Inputs.of(CASE), own)
    except RuntimeError as error:
        return str(error)
    return "no error"


def shorten(message: Any) -> None:
    object.__setattr__(message, "payload_bytes", message.payload_bytes - 64)


def test_a_message_that_is_longer_than_planned_is_not_taken_for_data() -> None:
    """gloo ends the process that it arrives at; the other rank says so. Shorter ones: see the other tests."""
    texts = run_ranks(longer_message, 2, group_timeout=20.0, expect_failure=True, timeout=60.0)
    assert texts[1] is None
    assert "rank 1 of the group (global rank 1) is gone" in texts[0]
