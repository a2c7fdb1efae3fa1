"""Exchanges on a device: packing and messages on a side stream, and no waiting of the host.

The order of memory use is this. At START the side stream waits for what the main stream was given so far: rows to be sent
are there, and buffers that went back to the pool are no longer read. At WAIT the main stream waits for the receives of
that exchange alone. When the pass drains, the main stream waits for everything on the side stream. So buffers of the pool,
and inputs that the caller frees after the pass, are never in use on the side stream when the main stream gets them again.

The headers of messages are compared on the device; a difference is raised at the next pass that finds the result there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_dcp.runtime.exchange import ExchangeError, Exchanges, _Pending
from hf_dcp.runtime.kernels.tables import BlockTables, key_of
from hf_dcp.runtime.messages import HEADER_BYTES, PreparedMessage
from hf_dcp.runtime.rows import Rows

CALL = 2
"""Which number of a header is that of the attention call: the only one that the plan doesn't know."""


class SideStream:
    """The stream that packs and sends, beside the current one, which computes.

    Args:
        device: a CUDA device; one stream per device is made, and shared.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-1)

    def fork(self) -> None:
        """What follows on the side stream comes after what the current stream was given so far."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def join(self) -> None:
        """What follows on the current stream comes after all that the side stream was given."""
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def use(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream)


class SameStream:
    """In place of a side stream where there is only one order, as on a CPU."""

    def fork(self) -> None: ...

    def join(self) -> None: ...

    def use(self) -> AbstractContextManager[Any]:
        return nullcontext()


_SIDE: dict[torch.device, SideStream] = {}


def side_stream(device: torch.device) -> SideStream | SameStream:
    """The side stream of a device."""
    if device.type != "cuda":
        return SameStream()
    index = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    if index not in _SIDE:
        _SIDE[index] = SideStream(index)
    return _SIDE[index]


def annotated(device: torch.device, name: str) -> AbstractContextManager[Any]:
    """A range in NVIDIA's profilers."""
    return torch.cuda.nvtx.range(name) if device.type == "cuda" else nullcontext()


@dataclass
class HeaderWatch:
    """Compares headers on a device and brings the verdict to the host without waiting for it."""

    device: torch.device
    wrong: Tensor = field(init=False)
    """int64[1] on the device: headers that were not as planned."""
    host: Tensor = field(init=False)
    _event: Any = None

    def __post_init__(self) -> None:
        self.wrong = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.host = torch.zeros(1, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def compare(self, header: Tensor, planned: Tensor, call: int) -> None:
        """Note whether a header int64[4] differs from what is planned, but for its number of the call."""
        difference = header - planned
        difference[CALL : CALL + 1].sub_(call)
        self.wrong.add_(difference.ne(0).any())

    def report(self) -> None:
        """Begin to bring the verdict to the host."""
        self.host.copy_(self.wrong, non_blocking=True)
        if self.device.type == "cuda":
            self._event = self._event or torch.cuda.Event()
            self._event.record()

    def verify(self) -> None:
        """Raise ExchangeError if a verdict has arrived and is bad."""
        if (self._event is None or self._event.query()) and int(self.host[0]):
            raise ExchangeError(
                f"{int(self.host[0])} messages of earlier attention calls were not what this rank's plan says: "
                "the ranks don't execute the same plan"
            )


@dataclass
class DeviceExchanges(Exchanges):
    """The messages of one pass on a device.

    Args:
        arena, tables: where input messages are received.
        side: the stream for packing and sending.
        watch: checks headers without waiting; None: at once, on the host.
        headers: planned headers of this pass's messages on the device, filled here at first use.
    """

    arena: Tensor | None = None
    tables: BlockTables | None = None
    side: SideStream | SameStream = field(default_factory=SameStream)
    watch: HeaderWatch | None = None
    headers: dict[Any, Tensor] = field(default_factory=dict)

    def place(self, arena: Tensor, tables: BlockTables) -> None:
        """Receive input messages in the arena."""
        self.arena, self.tables = arena, tables

    def start(self, exchange: int, tensors: dict[str, Rows]) -> None:
        self.side.fork()
        with self.side.use():
            super().start(exchange, tensors)

    def drain(self) -> None:
        super().drain()
        self.side.join()
        if self.watch is not None:
            self.watch.report()

    def _buffer(self, message: PreparedMessage) -> Tensor:
        if message.incoming and not message.partial and self.arena is not None and self.tables is not None:
            begin = self.tables.begin[key_of(message)]
            return self.arena[begin : begin + message.size]
        return super()._buffer(message)

    def _write_header(self, message: PreparedMessage, header: Tensor) -> None:
        if self.watch is None:
            super()._write_header(message, header)
            return
        header.copy_(self._planned(message))
        header[CALL : CALL + 1].fill_(self.call)

    def _planned(self, message: PreparedMessage) -> Tensor:
        """The header of a message as int64[4] on the device, with call 0."""
        key = key_of(message)
        if key not in self.headers:
            numbers = self._header(message)
            numbers[CALL] = 0
            self.headers[key] = torch.tensor(numbers, dtype=torch.int64).to(self.device)
        return self.headers[key]

    def _check(self, pending: _Pending) -> None:
        if self.watch is None:
            super()._check(pending)
            return
        header = pending.buffer[:HEADER_BYTES].view(torch.int64)
        self.watch.compare(header, self._planned(pending.message), self.call)
