"""Where the time of a pass goes, from the spans of the executor's instructions; and the same as a Chrome trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_dcp.planning.plan import Op

PARTS = ("exposed_exchange_s", "attention_s", "reduction_s", "other_s")
"""They add up to the whole pass; ``overlapped_s`` is the part of ``attention_s`` with an exchange under way behind it."""


@dataclass(frozen=True)
class Span:
    """One executed instruction, in seconds of one clock."""

    which: str
    op: Op
    argument: int
    begin: float
    end: float

    @property
    def duration(self) -> float:
        return self.end - self.begin


def decompose(spans: Sequence[Span], seconds: float) -> dict[str, float]:
    """The parts of one pass that took ``seconds``.

    Waiting for exchanges, and for the last sends, is exposed exchange; it includes unpacking. What lies outside of all
    instructions, and gathering rows to send, is "other".
    """
    by_op: dict[Op, float] = {}
    for span in spans:
        by_op[span.op] = by_op.get(span.op, 0.0) + span.duration
    attention, reduction = by_op.get(Op.ATTEND, 0.0), by_op.get(Op.REDUCE, 0.0)
    exposed = by_op.get(Op.WAIT, 0.0) + by_op.get(Op.FINISH, 0.0)
    return {
        "exposed_exchange_s": exposed,
        "attention_s": attention,
        "reduction_s": reduction,
        "other_s": max(seconds - attention - reduction - exposed, 0.0),
        "overlapped_s": _overlapped(spans),
    }


def _overlapped(spans: Sequence[Span]) -> float:
    """Attention between the START of some exchange and its WAIT."""
    under_way: set[int] = set()
    total = 0.0
    for span in spans:
        if span.op == Op.START:
            under_way.add(span.argument)
        elif span.op == Op.WAIT:
            under_way.discard(span.argument)
        elif span.op == Op.ATTEND and under_way:
            total += span.duration
    return total


def trace_events(name: str, rank: int, node: int, spans: Sequence[Span], zero: float) -> list[dict[str, Any]]:
    """Events of the Chrome trace format: a process per rank, its instructions, and exchanges as long as under way.

    Args:
        zero: the moment that the trace counts from, on the clock of the spans.
    """
    events = [
        {
            "name": f"{span.op.name.lower()} {span.argument}",
            "cat": f"{name} {span.which}",
            "ph": "X",
            "ts": (span.begin - zero) * 1e6,
            "dur": span.duration * 1e6,
            "pid": rank,
            "tid": 0,
            "args": {"plan": name, "pass": span.which, "node": node},
        }
        for span in spans
    ]
    for start, wait in _exchanges(spans):
        common = {"cat": f"{name} {start.which}", "id": start.argument, "pid": rank, "tid": 1}
        label = f"{name} {start.which} exchange {start.argument}"
        events.append({"name": label, "ph": "b", "ts": (start.begin - zero) * 1e6, **common})
        events.append({"name": label, "ph": "e", "ts": (wait.end - zero) * 1e6, **common})
    return events


def _exchanges(spans: Sequence[Span]) -> list[tuple[Span, Span]]:
    starts = {(span.which, span.argument): span for span in spans if span.op == Op.START}
    waits = [span for span in spans if span.op == Op.WAIT]
    return [(starts[wait.which, wait.argument], wait) for wait in waits if (wait.which, wait.argument) in starts]


def trace_names(world_size: int, nodes: Sequence[int]) -> list[dict[str, Any]]:
    """Events that name the processes of a trace."""
    return [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank} (node {nodes[rank]})"}}
        for rank in range(world_size)
    ]
