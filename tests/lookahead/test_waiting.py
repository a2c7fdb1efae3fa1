"""What is measured of waiting, how long ranks are patient, and what is said of a store that fails."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_dcp.lookahead import statistics as step_statistics
from hf_dcp.lookahead.patience import Patience
from hf_dcp.lookahead.statistics import FIELDS, StepStatistics
from hf_dcp.lookahead.watch import ALL_WELL_AFTER, StoreWatch
from tests.data.test_loader import loader
from tests.integrations.test_trainer import build, fresh


def test_patience_is_bounded_by_what_planning_takes() -> None:
    patience = Patience(60.0)
    assert patience.seconds() == 60.0  # nothing known yet
    patience.learn(0.4)
    assert patience.seconds() == 20.0
    waits = []
    for _ in range(6):
        patience.miss()
        waits.append(patience.seconds())
    assert waits == pytest.approx([5.0, 1.25, 1.2, 1.2, 1.2, 1.2])
    patience.hit()
    assert patience.seconds() == 20.0
    for _ in range(100):
        patience.learn(0.001)
    assert patience.seconds() == 10.0
    patience.hit(4.0)  # it came late: the machine is busy
    assert patience.seconds() == 16.0
    patience.miss()
    assert patience.seconds() == 4.0
    for _ in range(10):
        patience.hit(0.1)
    assert patience.seconds() == 10.0
    assert Patience(0.05).seconds() == 0.05


def _plan(trouble: str = "") -> Any:
    return SimpleNamespace(trouble=trouble, rank_plan=SimpleNamespace(rank=3))


def test_a_failing_store_is_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = StoreWatch()
    for _ in range(3):
        watch.see(_plan())
    for _ in range(5):
        watch.see(_plan("redis://host:1/0: nothing answers there"))
        watch.see(_plan())
    assert len(caplog.records) == 1
    assert (
        "rank 3 gets no plans of other ranks and makes them itself" in caplog.text and "nothing answers" in caplog.text
    )
    for _ in range(ALL_WELL_AFTER):
        watch.see(_plan())
    assert len(caplog.records) == 2 and "gets plans from the plan store again" in caplog.text
    watch.see(_plan("gone"))
    assert len(caplog.records) == 3


class Clock:
    """Goes on only when it is told to."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


def test_waits_are_those_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(step_statistics, "time", clock)
    statistics = StepStatistics()
    for wait in (0.05, 0.0, 0.0):
        with statistics.waiting():
            clock.now += wait
        clock.now += 0.02
    statistics.wait_s = 0.2
    waits, periods = zip(*statistics.steps)
    assert waits == pytest.approx((0.05, 0, 0)) and periods == pytest.approx((0.05, 0.02, 0.02))
    means = statistics.over_ranks(torch.device("cpu")).means()
    assert tuple(means) == FIELDS
    assert means["step_wait_s_p50"] < 1e-6 and means["step_wait_s_p99"] == pytest.approx(0.049)
    assert means["hidden"] == pytest.approx(1 - sum(waits) / 0.2, abs=1e-6)
    after = statistics.next()
    with after.waiting():
        pass
    assert after.steps[0][1] == pytest.approx(0.02)  # since the last wait, across log entries


def test_without_workers_nothing_is_hidden() -> None:
    made = loader()
    for _ in made:
        time.sleep(0.005)
    means = made.statistics.means()
    assert means["hidden"] == 0 and means["plans_made"] == len(made)
    assert len(made.statistics.steps) == len(made)
    assert means["step_wait_s_p50"] > 0 and means["plan_wait_s"] > 0


def test_of_trainer() -> None:
    """A slow collator makes every step wait, and the log entries say so."""
    fresh()
    trainer = build(1, max_steps=3, gradient_accumulation_steps=1)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(set(FIELDS) <= {name.removeprefix("dcp/") for name in entry} for entry in logs)
    (callback,) = (cb for cb in trainer.callback_handler.callbacks if hasattr(cb, "total"))
    assert len(callback.total.steps) == 3
    assert all(0 < wait <= period for wait, period in callback.total.steps)
    assert callback.summary()["plans_made"] == 3 and callback.summary()["hidden"] == 0
