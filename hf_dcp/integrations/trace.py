"""`DcpTraceCallback`: some steps of a training as a Chrome trace: planning, exchange and compute of every rank."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_dcp.bench.group import Group
from hf_dcp.bench.spans import Span, trace_events, trace_names
from hf_dcp.integrations.models import base_model
from hf_dcp.integrations.process_groups import collective_device, gather_texts, host_name
from hf_dcp.lookahead.batch_plan import BatchPlan
from hf_dcp.planning.batch import Topology
from hf_dcp.planning.plan import Op

PLANNING, STEPS = 2, 3
"""Threads of a rank's process in the trace; instructions are 0, exchanges under way 1."""


class DcpTraceCallback(TrainerCallback):
    """Pass one to Trainer, beside `hf_dcp.DcpStatsCallback`, to see where the time of some steps goes.

    The file opens in ui.perfetto.dev or chrome://tracing. Every rank is a process with four rows: instructions of the
    attention calls (gather and post, attend, wait, reduce), exchanges as long as they are under way, how this rank came
    by its plans (in a worker, ahead of the step), and steps with the waits for batches before them.

    On a GPU the instructions are those of the CPU that launches them, not of the device.

    Args:
        file: JSON file; the first rank writes it when the last of the steps is done.
        first_step: of those that are traced; the first ones compile and warm up.
        steps: how many.

    Raises:
        ValueError: for a file in a folder that isn't there, or no steps.
    """

    def __init__(self, file: str | Path, first_step: int = 3, steps: int = 3) -> None:
        self.file = Path(file)
        if not self.file.absolute().parent.is_dir():
            raise ValueError(f"the trace {file} is in a folder that doesn't exist: name a file in another")
        if first_step < 1 or steps < 1:
            raise ValueError(f"first_step and steps must be at least 1, not {first_step} and {steps}")
        self.first_step, self.steps = first_step, steps
        self._on = False
        self._spans: list[Span] = []
        self._events: list[dict[str, Any]] = []
        self._began = self._ended = time.perf_counter()
        self._hook: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        self._ended = time.perf_counter()
        self._hook = base_model(model).register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        step = state.global_step + 1
        self._on = self.first_step <= step < self.first_step + self.steps
        self._began = time.perf_counter()
        if self._on:
            self._add(f"wait for the batch of step {step}", self._ended, self._began, STEPS)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._ended = time.perf_counter()
        if not self._on:
            return
        self._on = False
        self._add(f"step {state.global_step}", self._began, self._ended, STEPS)
        if state.global_step == self.first_step + self.steps - 1:
            self._write()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._events:  # training was over before all steps were traced
            self._write()
        if self._hook is not None:
            self._hook.remove()

    def _before_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        plan = kwargs.get("dcp_plan")
        if not self._on or not module.training or not isinstance(plan, BatchPlan):
            return
        plan.executor.record = self._record
        if plan.ready_at:
            facts = {"plan_cpu_s": plan.report.plan_s, "tokens": plan.report.tokens, "origin": plan.origin}
            self._add(f"plan {plan.origin}", plan.ready_at - plan.wait_s, plan.ready_at, PLANNING, **facts)

    def _record(self, which: str, op: Op, argument: int, begin: float, end: float) -> None:
        self._spans.append(Span(which, Op(op), int(argument), begin, end))

    def _add(self, name: str, begin: float, end: float, thread: int, **facts: Any) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        event = {"name": name, "ph": "X", "ts": begin * 1e6, "dur": (end - begin) * 1e6, "pid": rank, "tid": thread}
        self._events.append({**event, "cat": "training", "args": facts})

    def _write(self) -> None:
        """Collective over all processes."""
        group = everybody()
        # one clock for all nodes: that of the wall, as well as they agree on it
        shift = (time.time() - time.perf_counter()) * 1e6
        mine = self._events + [event for call in calls(self._spans) for event in _events(call, group)]
        for event in mine:
            event["ts"] += shift
        everyone = group.gather(mine)
        self._events, self._spans = [], []
        if group.rank != 0:
            return
        events = [event for own in everyone for event in own]
        zero = min((event["ts"] for event in events), default=0.0)
        for event in events:
            event["ts"] -= zero
        names = trace_names(group.world_size, group.topology.node_of_rank) + thread_names(group.world_size)
        self.file.write_text(json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"}), "utf-8")


def calls(spans: Sequence[Span]) -> list[list[Span]]:
    """The instructions of one attention call after the other: each ends with FINISH."""
    found: list[list[Span]] = [[]]
    for span in spans:
        found[-1].append(span)
        if span.op == Op.FINISH:
            found.append([])
    return [call for call in found if call]


def _events(call: list[Span], group: Group) -> list[dict[str, Any]]:
    return trace_events("attention", group.rank, group.topology.node_of_rank[group.rank], call, 0.0)


def everybody() -> Group:
    """All processes and their nodes. Collective over all processes."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Group(0, Topology((0,)), torch.device("cpu"), None)
    device = collective_device("cuda" if torch.cuda.is_available() else "cpu")
    hosts = gather_texts(host_name(), device)
    return Group(dist.get_rank(), Topology.from_hosts(hosts), device, None)


def thread_names(world: int) -> list[dict[str, Any]]:
    """Events that name the rows of every rank."""
    names = {0: "attention", 1: "exchanges", PLANNING: "planning", STEPS: "steps"}
    return [
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
        for rank in range(world)
        for thread, name in names.items()
    ]
