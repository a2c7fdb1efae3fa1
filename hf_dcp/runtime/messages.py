"""Messages of a plan, prepared for one device: which rows they carry, and where in the buffer each tensor lies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hf_dcp.planning.plan import Message, Op, PassPlan, RankPlan
from hf_dcp.runtime.rows import Index, Rows

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEADER_BYTES = 32
"""int64: digest of the plan, payload bytes, number of the attention call, exchange. Not counted as sent."""

# What travels with a Q row and with a KV row, by (pass, whether partial results).
_CARRIED: dict[tuple[str, bool], tuple[tuple[str, ...], tuple[str, ...]]] = {
    ("forward", False): (("q",), ("k", "v")),
    ("forward", True): (("out", "lse"), ()),
    ("backward", False): (("q", "grad", "lse", "delta"), ("k", "v")),
    ("backward", True): (("dq",), ("dk", "dv")),
}
_STATISTICS = ("lse", "delta")
"""One fp32 per query head instead of a head's row."""


@dataclass(frozen=True)
class Section:
    """The rows of one tensor inside a message."""

    name: str
    index: Index
    offset: int
    """Bytes from the beginning of the message, header included."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """This section of a message buffer uint8[bytes], as its shape and dtype."""
        end = self.offset + math.prod(self.shape) * self.dtype.itemsize
        return buffer[self.offset : end].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class PreparedMessage:
    """One message from or to a peer."""

    exchange: int
    peer: int
    incoming: bool
    partial: bool
    link: str
    """"inter" or "intra": whether it leaves the node."""
    sections: tuple[Section, ...]
    payload_bytes: int

    @property
    def size(self) -> int:
        """Bytes, header included."""
        return HEADER_BYTES + self.payload_bytes

    def pack(self, tensors: dict[str, Rows], buffer: Tensor) -> None:
        for section in self.sections:
            section.index.read(tensors[section.name], section.view(buffer))

    def unpack(self, tensors: dict[str, Rows], buffer: Tensor) -> None:
        for section in self.sections:
            section.index.write(tensors[section.name], section.view(buffer))


@dataclass(frozen=True)
class MessageTable:
    """All messages of one pass of one rank, by exchange, in the order of the plan."""

    by_exchange: dict[int, list[PreparedMessage]]
    place: dict[int, str]
    """Where in the program each exchange is waited for, in words."""

    @classmethod
    def of(cls, plan: RankPlan, which: str, part: PassPlan, keep: bool, device: torch.device) -> MessageTable:
        """Args:
        which: "forward" or "backward".
        keep: whether backward has the remote Q, K and V of forward, so that they don't travel again.
        """
        builder = _Builder(plan, which, part, keep, device)
        by_exchange: dict[int, list[PreparedMessage]] = {}
        for row in part.messages:
            message = builder.message(row)
            if message.payload_bytes:
                by_exchange.setdefault(message.exchange, []).append(message)
        return cls(by_exchange, _places(part))

    @cached_property
    def sent(self) -> dict[tuple[str, int], int]:
        """Payload bytes that one call sends, by (link, peer)."""
        total: dict[tuple[str, int], int] = {}
        for messages in self.by_exchange.values():
            for m in messages:
                if not m.incoming:
                    total[m.link, m.peer] = total.get((m.link, m.peer), 0) + m.payload_bytes
        return total


def _places(part: PassPlan) -> dict[int, str]:
    """ ", in front of division d", or ", behind division d" for the last ones, by exchange."""
    places: dict[int, str] = {}
    waiting: list[int] = []
    division = None
    for op, argument in part.program.tolist():
        if op == Op.WAIT:
            waiting.append(argument)
        elif op == Op.ATTEND:
            division = argument
            places |= dict.fromkeys(waiting, f", in front of division {division}")
            waiting = []
    after = ", without divisions" if division is None else f", behind division {division}"
    return places | dict.fromkeys(waiting, after)


@dataclass
class _Builder:
    plan: RankPlan
    which: str
    part: PassPlan
    keep: bool
    device: torch.device

    def message(self, row: np.ndarray) -> PreparedMessage:
        partial = bool(row[Message.PARTIAL])
        peer = int(row[Message.PEER])
        q_names, kv_names = _CARRIED[self.which, partial]
        if self.which == "backward" and not partial and self.keep:
            q_names, kv_names = q_names[1:], ()
        sections = []
        for names, runs, begin in (
            (q_names, self.part.q_runs, Message.Q_BEGIN),
            (kv_names, self.part.kv_runs, Message.KV_BEGIN),
        ):
            own = runs[row[begin] : row[begin + 1]]
            if names and len(own):
                index = Index.of(self.plan, own, self.device)
                sections += [self._section(name, index, partial) for name in names]
        # Rows of whole 16 bytes first, as kernels read them in place; then the widest elements, so that all is aligned.
        sections.sort(key=lambda section: (section.row_bytes % 16 != 0, -section.dtype.itemsize))
        placed, offset = [], HEADER_BYTES
        for s in sections:
            placed.append(Section(s.name, s.index, offset, s.shape, s.dtype))
            offset += math.prod(s.shape) * s.dtype.itemsize
        nodes = self.plan.node_of_rank
        return PreparedMessage(
            exchange=int(row[Message.EXCHANGE]),
            peer=peer,
            incoming=bool(row[Message.INCOMING]),
            partial=partial,
            link="intra" if nodes[peer] == nodes[self.plan.rank] else "inter",
            sections=tuple(placed),
            payload_bytes=offset - HEADER_BYTES,
        )

    def _section(self, name: str, index: Index, partial: bool) -> Section:
        shape = self.plan.shape
        heads = (shape.kv_heads if name in ("k", "v", "dk", "dv") else shape.heads) // self.plan.head_groups
        if name in _STATISTICS:
            return Section(name, index, 0, (index.count, heads), torch.float32)
        dtype = DTYPES[self.plan.reduce_dtype if partial else shape.dtype]
        return Section(name, index, 0, (index.count, heads, shape.head_dim), dtype)
