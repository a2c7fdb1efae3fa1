"""The passes on a GPU: inputs stay in the model's type, received rows stay where they arrived, kernels merge and add.

What is exchanged, when, and what it means is the same as on a CPU; see `hf_dcp.runtime.passes`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hf_dcp.planning.plan import Op, RankPlan, WindowPlan
from hf_dcp.runtime.kernels import tuning
from hf_dcp.runtime.kernels.interpreter import interpreted
from hf_dcp.runtime.kernels.tables import ROWS, BlockTables, key_of
from hf_dcp.runtime.kernels.tile_list import build_tile_list
from hf_dcp.runtime.kernels.triton import DeviceTiles, Source, TritonKernel, aligned
from hf_dcp.runtime.messages import PreparedMessage
from hf_dcp.runtime.passes import Backward, Features, Forward, ForwardResult, _Run
from hf_dcp.runtime.rows import Rows
from hf_dcp.runtime.streams import annotated

if TYPE_CHECKING:
    from hf_dcp.runtime.executor import Executor


@dataclass
class TileWork:
    """The items of one division for GPU kernels, as tile lists of the sizes that kernels ask for."""

    plan: RankPlan
    part: WindowPlan
    order: np.ndarray
    device: torch.device
    _tiles: dict[tuple[int, int], DeviceTiles] = field(default_factory=dict)

    def tiles(self, config: tuning.Config) -> DeviceTiles:
        """The tile list for this tile shape, uploaded at the first call."""
        key = (config.tokens, config.columns)
        if key not in self._tiles:
            self._tiles[key] = DeviceTiles.of(build_tile_list(self.plan, self.part, self.order, *key), self.device)
        return self._tiles[key]


class _DeviceRun(_Run):
    """What both passes share."""

    in_place: ClassVar[bool] = True
    """Whether kernels read received rows where they arrived; otherwise they are copied into the order of places."""
    executor: Any
    """A `hf_dcp.runtime.device_executor.DeviceExecutor`."""
    exchanges: Any
    """`hf_dcp.runtime.streams.DeviceExchanges`"""
    tables: BlockTables
    arena: Tensor
    triton: TritonKernel
    configs: dict[str, tuning.Config]

    def __post_init__(self) -> None:
        super().__post_init__()
        executor, shape = self.executor, self.executor.plan.shape
        self.tables = executor.tables(self.features.window, self.which, self.features.keep)
        self.lent.append(executor.buffers.lend(max(self.tables.size, 16)))
        self.arena = self.lent[-1]
        self.exchanges.place(self.arena, self.tables)
        groups = executor.plan.head_groups
        self.triton = TritonKernel(
            shape.heads // groups,
            shape.kv_heads // groups,
            shape.head_dim,
            executor.plan.num_local,
            self.features.scale,
            self.features.softcap,
            exact=interpreted() or executor.dtype == torch.float32,
        )
        self.configs = executor.configs

    def step(self, op: Op, argument: int) -> None:
        """Execute one instruction, under its name in NVIDIA's profilers."""
        with annotated(self.executor.device, f"{self.which} {op.name.lower()} {argument}"):
            super().step(op, argument)

    def inputs(self, x: Tensor, remote: int) -> Rows:
        """Rows of an input [1, heads, S, D] in its own type; remote ones only as far as they are copied."""
        plan = self.executor.plan
        if self.in_place and not self.features.keep and not self.tables.relayed:
            remote = 0
        shape = (remote, x.shape[1] // plan.head_groups, x.shape[3])
        return self.rows(aligned(x[0]), torch.empty(shape, dtype=x.dtype, device=x.device))

    def source(self, name: str) -> Source:
        """An input as kernels read it: remote rows in the arena, or kept ones in the order of places."""
        rows = self.tensors[name]
        if not self.in_place or (self.features.keep and name != "grad"):
            return Source.of(rows)
        return Source(rows.local, self.arena.view(rows.local.dtype), self.tables.offsets[name])

    def receive(self, message: PreparedMessage, buffer: Tensor) -> None:
        """Copy what kernels don't read in place: statistics, kept rows, and rows that are sent on."""
        copied = not self.in_place or self.features.keep or key_of(message) in self.tables.relayed
        for section in message.sections:
            if copied or section.name not in ROWS:
                section.index.write(self.tensors[section.name], section.view(buffer))

    def wait(self, exchange: int) -> None:
        for message, buffer in self.exchanges.wait(exchange):
            if message.partial:
                self.received.setdefault(exchange, []).append((message, buffer))
            else:
                self.receive(message, buffer)


class DeviceForward(_DeviceRun, Forward):
    """Forward by Triton kernels."""

    def results(self) -> ForwardResult:
        lse = self.tensors["lse"].local.transpose(0, 1)
        kept_q, k, v = (self.tensors[name].remote.flatten(0, 1) for name in ("q", "k", "v"))
        if not self.features.keep:
            kept_q, k, v = (x[:0] for x in (kept_q, k, v))
        result = ForwardResult(
            self.result[None], lse, self.executor.kept(kept_q), self.executor.kept(torch.stack([k, v]))
        )
        self.done()
        return result

    def attend(self, division: int) -> None:
        config = self.configs["forward"]
        tiles = self.prepared.calls[division].tiles(config)  # type: ignore[attr-defined]
        q, k, v = (self.source(name) for name in ("q", "k", "v"))
        self.triton.forward(tiles, config, q, k, v, self.tensors["out"], self.tensors["lse"])

    def reduce(self, exchange: int) -> None:
        for message, buffer in self.received.pop(exchange, []):
            parts = {section.name: section.view(buffer) for section in message.sections}
            places = self.tables.places[key_of(message)]
            self.triton.merge(parts["out"], parts["lse"], places, self.tensors["out"], self.tensors["lse"])
            self.exchanges.give_back(buffer)

    def finish(self, _: int) -> None:
        self.result = self.triton.finish(self.tensors["out"], self.tensors["lse"], self.sinks, self.dtype)
        self.exchanges.drain()


class DeviceBackward(_DeviceRun, Backward):
    """Backward by Triton kernels; the output itself is only needed for delta."""

    def __init__(
        self, executor: Executor, features: Features, grad: Tensor, q: Tensor, k: Tensor, v: Tensor,
        sinks: Tensor | None, result: ForwardResult,
    ) -> None:  # fmt: skip
        _Run.__init__(self, executor, features, "backward")
        self.sinks, self.dtype = sinks, q.dtype
        nq, nkv = self.prepared.q_remote, self.prepared.kv_remote
        (heads, dim), kv_heads = (q.shape[1], q.shape[3]), k.shape[1]
        kept = {"q": result.kept_q, "k": result.kept_kv[0], "v": result.kept_kv[1]}
        for name, x, remote in (("q", q, nq), ("k", k, nkv), ("v", v, nkv)):
            self.tensors[name] = self.inputs(x, 0 if features.keep else remote)
            if features.keep:
                shape = (remote, x.shape[1] // executor.plan.head_groups, dim)
                self.tensors[name].remote = kept[name].to(x.dtype).view(shape)
        self.tensors["grad"] = self.inputs(grad.transpose(1, 2), nq)
        delta = (grad[0].float() * result.out[0].float()).sum(-1).transpose(0, 1)
        lse = result.lse.transpose(0, 1)
        lse = torch.where(lse == float("-inf"), float("inf"), lse)
        for name, local in (("lse", lse), ("delta", delta)):
            self.tensors[name] = self.rows(local, self.space(nq, heads))
        self.tensors["dq"] = self.zeros(heads, nq, dim)
        self.tensors["dk"], self.tensors["dv"] = (self.zeros(kv_heads, nkv, dim) for _ in range(2))

    def attend(self, division: int) -> None:
        work: Any = self.prepared.calls[division]
        q, grad, k, v = (self.source(name) for name in ("q", "grad", "k", "v"))
        lse, delta, dq, dk, dv = (self.tensors[name] for name in ("lse", "delta", "dq", "dk", "dv"))
        config = self.configs["dq"]
        self.triton.backward_q(work.tiles(config), config, q, grad, k, v, lse, delta, dq)
        config = self.configs["dkv"]
        self.triton.backward_kv(work.tiles(config), config, q, grad, k, v, lse, delta, dk, dv)
