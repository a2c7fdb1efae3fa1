"""Decomposition of a pass, and its trace, from spans made by hand."""

from __future__ import annotations

import json

import pytest

from hf_dcp.bench.spans import PARTS, Span, decompose, trace_events
from hf_dcp.planning.plan import Op

SPANS = [
    Span("forward", Op.START, 0, 0.0, 0.5),
    Span("forward", Op.ATTEND, 0, 1.0, 3.0),  # behind exchange 0
    Span("forward", Op.START, 5, 3.0, 3.25),
    Span("forward", Op.WAIT, 0, 3.25, 4.25),
    Span("forward", Op.ATTEND, 1, 4.25, 5.25),  # behind exchange 5
    Span("forward", Op.WAIT, 5, 5.25, 5.5),
    Span("forward", Op.REDUCE, 5, 5.5, 5.75),
    Span("forward", Op.ATTEND, 2, 5.75, 9.75),  # behind nothing
    Span("forward", Op.FINISH, 0, 9.75, 10.0),
]


def test_parts_add_up() -> None:
    parts = decompose(SPANS, 11.0)
    assert parts == {
        "exposed_exchange_s": 1.5,
        "attention_s": 7.0,
        "reduction_s": 0.25,
        "other_s": 2.25,
        "overlapped_s": 3.0,
    }
    assert sum(parts[name] for name in PARTS) == 11.0


def test_no_spans() -> None:
    assert decompose([], 2.0)["other_s"] == 2.0


def test_trace() -> None:
    events = trace_events("dcp", 3, 1, SPANS, zero=1.0)
    json.dumps(events)
    instructions = [event for event in events if event["ph"] == "X"]
    assert len(instructions) == len(SPANS)
    assert instructions[1]["name"] == "attend 0"
    assert (instructions[1]["ts"], instructions[1]["dur"]) == (0.0, 2e6)
    begins, ends = ([event for event in events if event["ph"] == ph] for ph in "be")
    assert [(b["id"], b["ts"], e["ts"]) for b, e in zip(begins, ends, strict=True)] == [
        (0, -1e6, 3.25e6),
        (5, 2e6, 4.5e6),
    ]
    assert {event["pid"] for event in events} == {3}


def test_exchanges_of_passes_are_told_apart() -> None:
    spans = [
        Span(which, op, 0, t, t + 1) for which, t in (("forward", 0), ("backward", 5)) for op in (Op.START, Op.WAIT)
    ]
    begins = [event["ts"] for event in trace_events("dcp", 0, 0, spans, 0.0) if event["ph"] == "b"]
    assert begins == pytest.approx([0.0, 5e6])
