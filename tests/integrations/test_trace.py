"""Traces of training steps: what is in the file, and that it changes nothing."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

import hf_dcp
from tests.integrations.test_trainer import build, fresh, summary
from tests.multiprocess import run_ranks

LAYERS, ACCUMULATED = 2, 2


def traced(file: str, world: int, steps: int = 2) -> dict:
    fresh()
    callbacks = [hf_dcp.DcpStatsCallback(), hf_dcp.DcpTraceCallback(file, first_step=2, steps=steps)]
    trainer = build(world, callbacks=callbacks, max_steps=4)
    trainer.train()
    return summary(trainer)


def by_name(events: list[dict], rank: int, thread: int) -> Counter:
    return Counter(e["name"].split()[0] for e in events if (e["pid"], e.get("tid"), e["ph"]) == (rank, thread, "X"))


def test_two_ranks_in_one_file(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    found = run_ranks(traced, 2, str(file), 2)
    assert found[0]["loss"] == pytest.approx(found[1]["loss"])
    events = json.loads(file.read_text("utf-8"))["traceEvents"]
    assert min(e["ts"] for e in events if "ts" in e) == 0
    names = {(e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert {(rank, name) for rank in (0, 1) for name in ("attention", "exchanges", "planning", "steps")} <= names
    for rank in (0, 1):
        instructions, batches = by_name(events, rank, 0), 2 * ACCUMULATED
        assert instructions["finish"] == 2 * LAYERS * batches  # forward and backward of every batch
        assert instructions["start"] == instructions["wait"]
        assert by_name(events, rank, 2) == {"plan": batches}
        assert by_name(events, rank, 3) == {"step": 2, "wait": 2}
        steps = [e for e in events if e["pid"] == rank and e.get("tid") == 3 and e["name"].startswith("step")]
        for event in events:
            if event["pid"] == rank and event.get("tid") == 0 and event["ph"] == "X":
                assert any(s["ts"] <= event["ts"] and event["ts"] + event["dur"] <= s["ts"] + s["dur"] for s in steps)
        begun = Counter(e["ph"] for e in events if e["pid"] == rank and e.get("tid") == 1)
        assert begun["b"] == begun["e"] == instructions["wait"]
    assert by_name(events, 0, 0)["start"] > 0


def test_a_short_training_is_traced_to_its_end_and_nothing_changes(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    with_trace = traced(str(file), 1, steps=100)
    events = json.loads(file.read_text("utf-8"))["traceEvents"]
    assert by_name(events, 0, 3) == {"step": 3, "wait": 3}
    fresh()
    trainer = build(1, max_steps=4)
    trainer.train()
    assert summary(trainer)["loss"] == with_trace["loss"]


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="in a folder that doesn't exist"):
        hf_dcp.DcpTraceCallback(tmp_path / "no" / "trace.json")
    with pytest.raises(ValueError, match="first_step and steps must be at least 1"):
        hf_dcp.DcpTraceCallback(tmp_path / "trace.json", steps=0)
