"""Timing contestants: in turns, forward and backward apart, the slowest rank counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_dcp.bench.contestants import Contestant, Sdpa
from hf_dcp.bench.group import Group
from hf_dcp.bench.spans import Span, decompose, trace_events
from hf_dcp.planning.batch import RowBytes
from hf_dcp.planning.plan import PASSES, Message, RankPlan
from hf_dcp.planning.simulate import message_bytes
from hf_dcp.runtime.handle import DcpPlan

WHOLE = "whole"
LINKS = ("inter", "intra")


@dataclass
class Timings:
    """What this rank has measured of one contestant, by (part, pass); parts: whole, and compute and exchange alone."""

    seconds: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    parts: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    """Decompositions by pass."""
    sent: dict[str, list[int]] = field(default_factory=dict)
    """Pass -> bytes that this rank has sent in one call, by `LINKS`."""
    spans: list[Span] = field(default_factory=list)
    """Of the last round."""

    def extend(self, other: Timings) -> None:
        """Take in what further rounds have measured of the same contestant."""
        for key, seconds in other.seconds.items():
            self.seconds.setdefault(key, []).extend(seconds)
        for which, parts in other.parts.items():
            self.parts.setdefault(which, []).extend(parts)
        self.sent |= other.sent
        self.spans = other.spans or self.spans


def measure(
    contestants: Sequence[Contestant],
    group: Group,
    repeats: int,
    warmup: int,
    parts: Sequence[str] | None = None,
) -> list[Timings]:
    """Rounds in which every contestant has its turn, in alternating order. Collective.

    Args:
        parts: of "whole", and what contestants have plans for alone, such as "compute"; None: all.
    """
    timings = [Timings() for _ in contestants]
    order = list(range(len(contestants)))
    for round_number in range(warmup + repeats):
        if round_number == warmup:
            timings = [Timings() for _ in contestants]
        for i in order if round_number % 2 == 0 else reversed(order):
            contestant, timing = contestants[i], timings[i]
            for part, plan in {WHOLE: contestant.plan, **contestant.alone}.items():
                if parts is None or part in parts:
                    _turn(contestant, part, plan, timing, group)
    return timings


def _turn(contestant: Contestant, part: str, plan: DcpPlan, timing: Timings, group: Group) -> None:
    """One forward and one backward."""
    recording = part == WHOLE and not isinstance(contestant, Sdpa)
    spans: list[Span] = []
    if recording:
        plan.stats.reset()
        plan.executor.record = lambda *span: spans.append(Span(*span))
    group.barrier()
    begin = time.perf_counter()
    out = contestant.forward(plan)
    _synchronise(group)
    middle = time.perf_counter()
    group.barrier()
    again = time.perf_counter()
    contestant.backward(out)
    _synchronise(group)
    end = time.perf_counter()
    for which, seconds in zip(PASSES, (middle - begin, end - again)):
        timing.seconds.setdefault((part, which), []).append(seconds)
        if recording:
            own = [span for span in spans if span.which == which]
            timing.parts.setdefault(which, []).append(decompose(own, seconds))
            timing.sent[which] = [plan.stats.sent[which, link] for link in LINKS]
    if recording:
        plan.executor.record = None
        timing.spans = spans


def _synchronise(group: Group) -> None:
    if group.device.type == "cuda":
        import torch

        torch.cuda.synchronize(group.device)


def planned(plan: RankPlan, which: str, keep: bool) -> dict[str, list[int]]:
    """Bytes of this rank in one pass: sent, by `LINKS`, and sent and received."""
    part = plan.windows[0].forward if which == "forward" else plan.windows[0].backward
    row = RowBytes.of(plan.shape, plan.head_groups, plan.reduce_dtype)
    size = message_bytes(part, row, "backward_keep" if keep and which == "backward" else which)
    out = part.messages[:, Message.INCOMING] == 0
    foreign = [plan.node_of_rank[peer] != plan.node_of_rank[plan.rank] for peer in part.messages[:, Message.PEER]]
    inter = int(size[out & foreign].sum()) if len(size) else 0
    return {"sent": [inter, int(size[out].sum()) - inter], "traffic": [int(size.sum())]}


def collect(contestant: Contestant, timing: Timings, group: Group) -> dict[str, Any]:
    """The report of one contestant, from all ranks. Collective.

    Returns:
        by pass: "seconds" (median of the slowest rank of each round), "seconds_each", "compute_s" and "exchange_s"
        (each alone, if measured), "decomposition" (means over ranks of medians), bytes planned and sent.
    """
    keep = contestant.plan.backward_kv == "keep"
    mine: dict[str, Any] = {
        "seconds": [[part, which, times] for (part, which), times in timing.seconds.items()],
        "parts": {which: _medians(parts) for which, parts in timing.parts.items()},
        "sent": timing.sent,
        "planned": {which: planned(contestant.rank_plan, which, keep) for which in PASSES},
    }
    everyone = group.gather(mine)
    report: dict[str, Any] = {which: {} for which in PASSES}
    for n, (part, which, _) in enumerate(mine["seconds"]):
        slowest = [max(times) for times in zip(*(rank["seconds"][n][2] for rank in everyone))]
        if part == WHOLE:
            report[which] |= {"seconds": statistics.median(slowest), "seconds_each": slowest}
        else:
            report[which][f"{part}_s"] = statistics.median(slowest)
    for which in PASSES if timing.parts else ():
        report[which] |= _passes(everyone, which)
    return report


def _passes(everyone: list[dict[str, Any]], which: str) -> dict[str, Any]:
    parts = [rank["parts"][which] for rank in everyone]
    sent = [sum(rank["sent"][which][i] for rank in everyone) for i in range(len(LINKS))]
    wanted = [sum(rank["planned"][which]["sent"][i] for rank in everyone) for i in range(len(LINKS))]
    return {
        "decomposition": {name: statistics.fmean(part[name] for part in parts) for name in parts[0]},
        "bytes_planned": dict(zip(LINKS, wanted)),
        "bytes_sent": dict(zip(LINKS, sent)),
        "max_device_bytes": max(rank["planned"][which]["traffic"][0] for rank in everyone),
    }


def _medians(parts: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(part[name] for part in parts) for name in parts[0]}


def trace(contestants: Sequence[Contestant], timings: Sequence[Timings], group: Group) -> list[dict[str, Any]]:
    """Trace events of the last round, of all ranks. Collective."""
    # ranks leave the barrier before their first instruction at about the same moment
    zero = min((span.begin for timing in timings for span in timing.spans), default=0.0)
    mine = []
    for contestant, timing in zip(contestants, timings):
        mine += trace_events(contestant.name, group.rank, group.topology.node_of_rank[group.rank], timing.spans, zero)
    return [event for events in group.gather(mine) for event in events]
