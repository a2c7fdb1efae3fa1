"""The two passes of one attention call: each walks the instructions of its plan, and knows nothing else."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_dcp.planning.plan import Op, PassPlan, WindowPlan
from hf_dcp.runtime.attend import Kernel
from hf_dcp.runtime.buffers import shaped
from hf_dcp.runtime.calls import Call
from hf_dcp.runtime.exchange import Exchanges
from hf_dcp.runtime.kernels.merge import merge
from hf_dcp.runtime.messages import MessageTable, PreparedMessage
from hf_dcp.runtime.rows import Rows

if TYPE_CHECKING:
    from hf_dcp.runtime.executor import Executor


@dataclass(frozen=True)
class Features:
    """What an attention call does beyond the plan."""

    window: int | None
    scale: float
    softcap: float | None = None
    keep: bool = False
    """Whether forward returns the remote rows it received, and backward takes them."""


@dataclass(frozen=True)
class ForwardResult:
    out: Tensor
    """[1, S, heads, D] in the dtype of q."""
    lse: Tensor
    """[S, heads], fp32 (fp64 for fp64 inputs), of all columns and the sink; -inf where there are none."""
    kept_q: Tensor
    """[remote Q rows * heads / groups, D] if kept, else [0, D]; in the dtype of computation (on a GPU: of q)."""
    kept_kv: Tensor
    """[2, remote KV rows * KV heads / groups, D] if kept, else [2, 0, D]."""


@dataclass(frozen=True)
class Prepared:
    """What all calls of one window and pass share."""

    part: WindowPlan
    program: list[tuple[Op, int]]
    calls: tuple[list[Call], ...]
    """Kernel calls by division."""
    messages: MessageTable
    q_remote: int
    kv_remote: int

    @classmethod
    def of(cls, executor: Executor, part: WindowPlan, which: str, keep: bool) -> Prepared:
        one: PassPlan = part.forward if which == "forward" else part.backward
        bounds = one.divisions.tolist()
        calls = tuple(executor.calls(part, one.order[begin:end]) for begin, end in pairwise(bounds))
        messages = MessageTable.of(executor.plan, which, one, keep, executor.device)
        program = [(Op(op), argument) for op, argument in one.program.tolist()]
        remote = [int(table[:, 1].sum()) for table in (part.q_remote, part.kv_remote)]
        return cls(part, program, calls, messages, remote[0], remote[1])


@dataclass
class _Run:
    """One pass of one attention call."""

    executor: Executor
    features: Features
    which: str
    prepared: Prepared = field(init=False)
    exchanges: Exchanges = field(init=False)
    kernel: Kernel = field(init=False)
    tensors: dict[str, Rows] = field(default_factory=dict)
    received: dict[int, list[tuple[PreparedMessage, Tensor]]] = field(default_factory=dict)
    """Partial results by exchange, until their REDUCE."""
    lent: list[Tensor] = field(default_factory=list)
    """Buffers behind remote rows."""

    def __post_init__(self) -> None:
        self.prepared = self.executor.prepared(self.features.window, self.which, self.features.keep)
        self.exchanges = self.executor.exchanges(self.prepared, self.which)
        self.kernel = Kernel(self.features.scale, self.features.softcap, self.executor.masks)

    def walk(self) -> None:
        """Execute the instructions one after the other."""
        record = self.executor.record
        for op, argument in self.prepared.program:
            begin = time.perf_counter() if record else 0.0
            self.step(op, argument)
            if record:
                record(self.which, op, argument, begin, time.perf_counter())

    def step(self, op: Op, argument: int) -> None:
        """Execute one instruction."""
        steps = {Op.START: self.start, Op.ATTEND: self.attend, Op.WAIT: self.wait, Op.REDUCE: self.reduce}
        steps.get(op, self.finish)(argument)

    def start(self, exchange: int) -> None:
        self.exchanges.start(exchange, self.tensors)

    def wait(self, exchange: int) -> None:
        for message, buffer in self.exchanges.wait(exchange):
            if message.partial:
                self.received.setdefault(exchange, []).append((message, buffer))
            else:
                message.unpack(self.tensors, buffer)
                self.exchanges.give_back(buffer)
                self.unpacked(message)

    def unpacked(self, message: PreparedMessage) -> None:
        """Hook: inputs have arrived."""

    def attend(self, division: int) -> None:
        raise NotImplementedError

    def reduce(self, exchange: int) -> None:
        raise NotImplementedError

    def finish(self, _: int) -> None:
        self.exchanges.drain()

    def inputs(self, x: Tensor, remote: int) -> Rows:
        """Rows of an input [1, heads, S, D], in the dtype of computation, remote rows still to come."""
        local = x[0].to(self.executor.compute_dtype)
        if local.stride(-1) != 1:  # kernels take any strides but this one, and don't say so
            local = local.contiguous()
        return self.rows(local, self.space(remote, x.shape[1], x.shape[3]))

    def zeros(self, heads: int, remote: int, dim: int | None, value: float = 0.0) -> Rows:
        """Accumulators of local and remote rows; the local ones, tokens outside and heads inside, may be returned."""
        tail = () if dim is None else (dim,)
        shape = (max(self.executor.plan.num_local, 1), heads, *tail)
        local = torch.full(shape, value, dtype=self.executor.compute_dtype, device=self.executor.device)
        return self.rows(local.transpose(0, 1), self.space(remote, heads, *tail).fill_(value))

    def rows(self, local: Tensor, remote: Tensor) -> Rows:
        return Rows(local, remote, self.executor.plan.num_local, self.executor.plan.head_groups)

    def space(self, rows: int, heads: int, *tail: int) -> Tensor:
        """Memory for remote rows until the pass ends, of whatever content: [rows, heads / groups, ...]."""
        shape, dtype = (rows, heads // self.executor.plan.head_groups, *tail), self.executor.compute_dtype
        self.lent.append(self.executor.buffers.lend(math.prod(shape) * dtype.itemsize))
        return shaped(self.lent[-1], shape, dtype)

    def done(self) -> None:
        """The pass is over, and nothing that it returns refers to remote rows."""
        self.tensors.clear()
        self.executor.buffers.take_back(self.lent)


class Forward(_Run):
    def __init__(self, executor: Executor, features: Features, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None):
        super().__init__(executor, features, "forward")
        self.sinks, self.dtype = sinks, q.dtype
        nq, nkv = self.prepared.q_remote, self.prepared.kv_remote
        self.tensors = {"q": self.inputs(q, nq), "k": self.inputs(k, nkv), "v": self.inputs(v, nkv)}
        heads, dim = q.shape[1], q.shape[3]
        self.tensors["out"] = self.zeros(heads, nq, dim)
        self.tensors["lse"] = self.zeros(heads, nq, None, float("-inf"))

    def execute(self) -> ForwardResult:
        self.walk()
        return self.results()

    def results(self) -> ForwardResult:
        """What the pass returns, after its last instruction."""
        out, lse = self.tensors["out"].local.transpose(0, 1), self.tensors["lse"].local.transpose(0, 1)
        kept_q, k, v = (self.tensors[name].remote.flatten(0, 1) for name in ("q", "k", "v"))
        if not self.features.keep:
            kept_q, k, v = (x[:0] for x in (kept_q, k, v))
        result = ForwardResult(out.to(self.dtype)[None], lse, kept_q.clone(), torch.stack([k, v]))
        self.done()
        return result

    def attend(self, division: int) -> None:
        q, k, v, out, lse = (self.tensors[name] for name in ("q", "k", "v", "out", "lse"))
        for call in self.prepared.calls[division]:
            rows = (call.group, call.q, call.count, call.q_step)
            part, part_lse = self.kernel.forward(call, q.repeated(*rows), k.gather(call), v.gather(call))
            merge(out.repeated(*rows), lse.repeated(*rows), part, part_lse)

    def reduce(self, exchange: int) -> None:
        out, lse = self.tensors["out"], self.tensors["lse"]
        for message, buffer in self.received.pop(exchange, []):
            parts = {section.name: section for section in message.sections}
            index = parts["out"].index
            so_far = out.remote.new_empty(parts["out"].shape)
            so_far_lse = lse.remote.new_empty(parts["lse"].shape)
            index.read(out, so_far)
            index.read(lse, so_far_lse)
            part = parts["out"].view(buffer).to(so_far.dtype)
            merge(so_far, so_far_lse, part, parts["lse"].view(buffer).to(so_far.dtype))
            index.write(out, so_far)
            index.write(lse, so_far_lse)
            self.exchanges.give_back(buffer)

    def finish(self, _: int) -> None:
        if self.sinks is not None:
            out, lse = self.tensors["out"].local, self.tensors["lse"].local
            sinks = self.sinks.to(lse.dtype)[:, None].expand_as(lse)
            merge(out, lse, torch.zeros_like(out), sinks.contiguous())
        super().finish(0)


class Backward(_Run):
    def __init__(
        self,
        executor: Executor,
        features: Features,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        result: ForwardResult,
    ):
        super().__init__(executor, features, "backward")
        self.sinks, self.dtype = sinks, q.dtype
        nq, nkv = self.prepared.q_remote, self.prepared.kv_remote
        (heads, dim), kv_heads = (q.shape[1], q.shape[3]), k.shape[1]
        kept = {"q": result.kept_q, "k": result.kept_kv[0], "v": result.kept_kv[1]}
        for name, x, remote in (("q", q, nq), ("k", k, nkv), ("v", v, nkv)):
            self.tensors[name] = self.inputs(x, 0 if features.keep else remote)
            if features.keep:
                self.tensors[name].remote = kept[name].view(remote, x.shape[1] // executor.plan.head_groups, dim)
        self.tensors["grad"] = self.inputs(grad.transpose(1, 2), nq)
        self.tensors["out"] = self.inputs(result.out.transpose(1, 2), nq)
        delta = (self.tensors["grad"].local * self.tensors["out"].local).sum(-1)
        lse = result.lse.transpose(0, 1)
        # Rows that attend to nothing: exp(score - inf) is the 0 that they contribute.
        lse = torch.where(lse == float("-inf"), float("inf"), lse)
        for name, local in (("lse", lse), ("delta", delta)):
            self.tensors[name] = self.rows(local, self.space(nq, heads))
        self.tensors["dq"] = self.zeros(heads, nq, dim)
        self.tensors["dk"], self.tensors["dv"] = (self.zeros(kv_heads, nkv, dim) for _ in range(2))

    def execute(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        self.walk()
        return self.results()

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """What the pass returns, after its last instruction."""
        dq, dk, dv = (self.tensors[name].local[None].to(self.dtype) for name in ("dq", "dk", "dv"))
        sinks = self.sink_gradient()
        self.done()
        return dq, dk, dv, sinks

    def sink_gradient(self) -> Tensor | None:
        """A sink takes the share exp(sink - lse) of every row, and has no value: its gradient is -share * delta."""
        if self.sinks is None:
            return None
        rows = self.executor.plan.num_local
        lse, delta = (self.tensors[name].local[:, :rows] for name in ("lse", "delta"))
        share = torch.exp(self.sinks.to(lse.dtype)[:, None] - lse)
        return -(share * delta).sum(1).to(self.sinks.dtype)

    def unpacked(self, message: PreparedMessage) -> None:
        self.kernel.receive(message, self.tensors)

    def attend(self, division: int) -> None:
        q, k, v = (self.tensors[name] for name in ("q", "k", "v"))
        per_row = [self.tensors[name] for name in ("grad", "out", "delta", "lse")]
        for call in self.prepared.calls[division]:
            rows = (call.group, call.q, call.count, call.q_step)
            row_views = [one.repeated(*rows) for one in per_row]
            dq, dk, dv = self.kernel.backward(call, q.repeated(*rows), k.gather(call), v.gather(call), *row_views)
            self.tensors["dq"].repeated(*rows).add_(dq)
            self.tensors["dk"].scatter_add(call, dk)
            self.tensors["dv"].scatter_add(call, dv)

    def reduce(self, exchange: int) -> None:
        for message, buffer in self.received.pop(exchange, []):
            for section in message.sections:
                section.index.add(self.tensors[section.name], section.view(buffer))
            self.exchanges.give_back(buffer)
