"""The device's exchanges, without a device: the order of work on two streams, arenas, headers that nobody waits for."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from hf_dcp.planning.plan import Message
from hf_dcp.planning.planner import plan_batch
from hf_dcp.runtime import groups, streams
from hf_dcp.runtime.cases import Case
from hf_dcp.runtime.device_executor import DeviceExecutor
from hf_dcp.runtime.exchange import ExchangeError
from hf_dcp.runtime.handle import DcpPlan
from hf_dcp.runtime.kernels.tables import ROWS, key_of
from hf_dcp.runtime.streams import DeviceExchanges, HeaderWatch, SameStream, annotated, side_stream
from tests.multiprocess import run_ranks
from tests.runtime.placements import random_placement

CPU = torch.device("cpu")


class RecordedStream:
    """A side stream that writes down what it is asked for."""

    def __init__(self, log):
        self.log = log

    def fork(self):
        self.log.append("side waits for main")

    def join(self):
        self.log.append("main waits for side")

    @contextmanager
    def use(self):
        self.log.append("begin side")
        yield
        self.log.append("end side")


class Work:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait(self):
        self.log.append(f"main waits for {self.name}")


def executor_of(rank=1, case=None, world=3):
    case = case or Case("causal", (150, 37), 16, dtype="bf16", head_dim=16)
    plan = plan_batch(case.batch, case.topology(world), case.shape(), case.config(), solver=random_placement(0))
    return DeviceExecutor(DcpPlan(plan.rank(rank), device="cpu"))


def exchanges_of(executor, log, watch=None, which="forward"):
    prepared = executor.prepared(None, which)
    made = DeviceExchanges(
        prepared.messages, None, which, executor.plan.digest, CPU, (executor.stats,), 7, _pool(executor),
        side=RecordedStream(log), watch=watch,
    )  # fmt: skip
    tables = executor.tables(None, which, False)
    made.place(torch.zeros(tables.size, dtype=torch.uint8), tables)
    return made, tables


def _pool(executor):
    from hf_dcp.runtime.buffers import BufferPool

    return BufferPool(CPU)


def test_order_of_streams(monkeypatch):
    """Packing and posting on the side stream after what main was given; main waits for receives, and at the end for all."""
    log = []
    executor = executor_of()
    made, _ = exchanges_of(executor, log)
    posted = []

    def post(self, pairs, partial):
        for message, buffer in pairs:
            log.append(f"{'receive' if message.incoming else 'send'} {message.exchange}")
            pending = streams._Pending(message, buffer, Work(log, f"{message.incoming} {message.exchange}"))
            (self._receiving.setdefault(message.exchange, []) if message.incoming else self._sending).append(pending)
            posted.append(message)

    monkeypatch.setattr(DeviceExchanges, "_post", post)
    monkeypatch.setattr(DeviceExchanges, "_check", lambda *_: None)
    monkeypatch.setattr(streams.PreparedMessage, "pack", lambda *_: None)
    first = min(made.table.by_exchange)
    made.start(first, {})
    posts = [entry for entry in log if entry.startswith(("receive", "send"))]
    assert log == ["side waits for main", "begin side", *posts, "end side"] and posts
    assert posts == sorted(posts, key=lambda entry: entry.startswith("send")), "receives are posted first"
    log.clear()
    made.wait(first)
    assert log and all(entry == f"main waits for True {first}" for entry in log), (
        "not for sends, nor for other exchanges"
    )
    log.clear()
    made.drain()
    assert log[-1] == "main waits for side" and f"main waits for False {first}" in log


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_messages_lie_in_the_arena_and_tables_find_their_rows(which):
    """Every remote row that a table names is where an unpacked message would say that it is."""
    found = 0
    for rank in range(3):
        executor = executor_of(rank)
        made, tables = exchanges_of(executor, [], which=which)
        spans = []
        for messages in made.table.by_exchange.values():
            for message in messages:
                if not message.incoming or message.partial:
                    continue
                buffer = made._buffer(message)
                begin = buffer.data_ptr() - made.arena.data_ptr()
                spans.append((begin, begin + message.size))
                assert begin % 256 == 0 and begin == tables.begin[key_of(message)]
                for section in message.sections:
                    if section.name not in ROWS:
                        continue
                    values = section.view(buffer)
                    values.copy_(torch.randn(values.shape))
                    rows = executor_rows(executor, section, which)
                    section.index.write(rows, values)
                    offsets = tables.offsets[section.name]
                    arena = made.arena.view(values.dtype)
                    width = values[0].numel()
                    for row in np.flatnonzero(written(executor, section)):
                        at = int(offsets[row]) * 8
                        assert torch.equal(arena[at : at + width], rows.remote[row].flatten())
                        found += 1
        spans.sort()
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:])), "messages don't overlap"  # noqa: RUF007
    assert found > 100


def executor_rows(executor, section, which):
    from hf_dcp.runtime.rows import Rows

    part = executor.plan.window(None)
    remote = int((part.q_remote if ROWS[section.name] == "q" else part.kv_remote)[:, 1].sum())
    shape = (remote, *section.shape[1:])
    groups = executor.plan.head_groups
    local = torch.zeros(max(executor.plan.num_local, 1), section.shape[1] * groups, section.shape[2])
    return Rows(
        local.to(section.dtype).transpose(0, 1),
        torch.zeros(shape, dtype=section.dtype),
        executor.plan.num_local,
        groups,
    )


def written(executor, section):
    """Which remote rows a section fills."""
    rows = executor_rows(executor, section, "")
    section.index.write(rows, torch.ones(section.shape, dtype=section.dtype))
    return rows.remote.flatten(1).any(1).numpy()


def test_rows_that_are_sent_on_are_named():
    """On ranks that relay, the messages whose rows travel on are copied too."""
    case = Case("full", (256,), 16, dtype="bf16", nodes=(0, 0, 1, 1))
    relayed = 0
    plan = plan_batch(case.batch, case.topology(4), case.shape(), case.config(), solver=random_placement(3))
    for rank in range(4):
        executor = DeviceExecutor(DcpPlan(plan.rank(rank)))
        tables = executor.tables(None, "forward", False)
        one = executor.plan.window(None).forward
        base = executor.plan.num_local * executor.plan.head_groups
        sent = [m for m in one.messages if not m[Message.INCOMING] and not m[Message.PARTIAL]]
        on = any(
            (executor.plan.slots(one.kv_runs[m[Message.KV_BEGIN] : m[Message.KV_END]]) >= base).any() for m in sent
        )
        assert on <= bool(tables.relayed)
        relayed += len(tables.relayed)
    assert relayed > 0


def test_headers_are_compared_without_waiting():
    watch = HeaderWatch(CPU)
    planned = torch.tensor([11, 22, 0, 3])
    watch.compare(torch.tensor([11, 22, 7, 3]), planned, 7)
    watch.report()
    watch.verify()
    for wrong in ([12, 22, 7, 3], [11, 22, 8, 3], [11, 21, 7, 3]):
        watch.compare(torch.tensor(wrong), planned, 7)
    watch.verify()  # the verdict has not been brought over yet
    watch.report()
    with pytest.raises(ExchangeError, match="3 messages of earlier attention calls were not what"):
        watch.verify()


def test_headers_are_written_as_the_other_side_expects_them():
    made, _ = exchanges_of(executor_of(), [], watch=HeaderWatch(CPU))
    message = next(m for messages in made.table.by_exchange.values() for m in messages)
    header = torch.zeros(4, dtype=torch.int64)
    made._write_header(message, header)
    assert header.tolist() == made._header(message)
    watch = made.watch
    watch.compare(header, made._planned(message), made.call)
    assert int(watch.wrong) == 0
    watch.compare(header, made._planned(message), made.call + 1)
    assert int(watch.wrong) == 1


def numbers_of_ranks():
    groups._of_gpu = lambda _: True  # as if messages went over NCCL
    communicator = groups.Communicator.create([[1, 0]])
    separate = communicator.host_group not in (None, communicator.forward_group, communicator.reverse_group)
    found = communicator.gather_numbers([communicator.rank, 10])
    communicator.close()
    return [separate, found]


def test_digests_are_compared_on_a_group_of_the_host():
    assert run_ranks(numbers_of_ranks, 2, timeout=60) == [[True, [[0, 10], [1, 10]]]] * 2


def test_a_cpu_has_one_order_and_no_ranges():
    assert isinstance(side_stream(CPU), SameStream)
    with annotated(CPU, "anything"):
        pass


def test_a_cuda_side_stream_waits_and_is_waited_for(monkeypatch):
    """With torch's streams replaced by recorders: fork and join are waits of streams, never of the host."""
    log = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            log.append(f"{self.name} waits for {other.name}")

        def synchronize(self):
            raise AssertionError("the host waits")

    main = Stream("main")
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: Stream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: main)
    side = streams.SideStream(torch.device("cuda", 0))
    side.fork()
    side.join()
    assert log == ["side waits for main", "main waits for side"]
