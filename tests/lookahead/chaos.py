"""What the ranks of the chaos tests do: train a few steps while the plan store is disturbed."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import redis
import torch
import torch.distributed as dist
from torch import nn

import hf_dcp
from hf_dcp.lookahead import planning
from hf_dcp.planning.planner import plan_batch
from tests.integrations.small import random_lengths, rows, small_llama
from tests.lookahead.servers import Proxy, RedisServer, free_port

STEPS = 16
CONFIG = hf_dcp.DcpConfig(block_size=8)
DATA = rows(random_lengths(60, seed=3, least=20, most=60))
Disturb = Callable[[int], Any]


class Training:
    """A run of this rank: a small model, its loader, and plain SGD.

    Args:
        store: plan store.
        heads: KV heads of the model.
        lookahead: of the loader.
        timeout: plan_timeout.
    """

    def __init__(self, store: str, heads: int = 2, lookahead: int = 4, timeout: float = 2.0) -> None:
        plugin = hf_dcp.DcpParallelismConfig(
            dcp_size=dist.get_world_size(), dcp=CONFIG, plan_store=store, plan_timeout=timeout
        )
        self.model = small_llama(num_key_value_heads=heads)
        self.loader = hf_dcp.DcpDataLoader(
            DATA, config=plugin, model=self.model, tokens_per_batch=120, lookahead=lookahead, num_workers=1
        )
        self.session = plugin.session
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.origins: list[str] = []
        self.batches: list[int] = []

    def steps(self, disturb: Disturb | None = None, stop: int = STEPS) -> Training:
        """Train until step ``stop``, counted from the first. ``disturb`` runs on rank 0, before each step."""
        iterator = iter(self.loader)
        for _ in self.one_by_one(iterator, stop):
            if disturb is not None:
                if dist.get_rank() == 0:
                    disturb(len(self.batches))
                dist.barrier()
        iterator.close()  # its workers end, and take their plans out of the store
        return self

    def one_by_one(self, iterator: Any, stop: int = STEPS) -> Any:
        while len(self.batches) < stop:
            yield
            batch = next(iterator)
            self.origins.append(batch["dcp_plan"].origin)
            self.batches.append(batch["dcp_plan"].report.tokens)
            self.model(**batch, use_cache=False).loss.backward()
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def answer(self, server: RedisServer | None = None) -> dict[str, Any]:
        dist.barrier()
        deadline = time.monotonic() + 20
        while server is not None and _alive(server) and server.held() and time.monotonic() < deadline:
            time.sleep(0.05)  # workers that were told to end are about to
        return {
            "parameters": digest(self.model),
            "origins": self.origins,
            "batches": self.batches,
            "failing": self.session._watch.failing,
            "keys": [key.decode() for key in server.held()] if server is not None and _alive(server) else [],
        }


def _alive(server: RedisServer) -> bool:
    with contextlib.suppress(redis.RedisError):
        return bool(server.admin().ping())
    return False


def digest(model: nn.Module) -> str:
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def at(**actions: Callable[[], Any]) -> Disturb:
    """Actions by the step before which they run, such as ``at(s3=server.kill)``."""
    return lambda step: actions.get(f"s{step}", lambda: None)()


def killed(folder: Path, binary: str, server: RedisServer, url: str) -> dict[str, Any]:
    """Killed and, some steps later, started again, empty."""

    def back() -> None:
        server.start()
        time.sleep(3)  # until it is tried again

    return Training(url).steps(at(s3=server.kill, s8=back)).answer(server)


def frozen(folder: Path, binary: str, server: RedisServer, url: str) -> dict[str, Any]:
    """Frozen for 5 seconds, in which training goes on."""
    since = 0.0

    def disturb(step: int) -> None:
        nonlocal since
        if step == 3:
            server.freeze()
            since = time.monotonic()
        elif step == 10:
            time.sleep(max(0.0, since + 5 - time.monotonic()))
            server.thaw()
            time.sleep(2.5)

    return Training(url).steps(disturb).answer(server)


def flushed(folder: Path, binary: str, server: RedisServer, url: str) -> dict[str, Any]:
    """Emptied six times, while plans are put there and fetched."""
    return Training(url).steps(lambda step: 3 <= step < 9 and server.admin().flushall()).answer(server)


def full(folder: Path, binary: str, server: RedisServer, url: str) -> dict[str, Any]:
    """The server takes nothing more for some steps."""
    limit = server.admin().config_set

    def again() -> None:
        limit("maxmemory", 0)
        time.sleep(2)

    return Training(url).steps(at(s3=lambda: limit("maxmemory", 1), s8=again)).answer(server)


def corrupted(folder: Path, binary: str, server: RedisServer, url: str) -> dict[str, Any]:
    """Every payload of ten steps and more is damaged on its way."""
    with Proxy(server.port, folder / f"proxy{dist.get_rank()}") as proxy:
        proxy.set("corrupt")
        training = Training(proxy.url).steps(stop=11)
        proxy.set("")
        return training.steps().answer(server)


def slow(folder: Path, binary: str, server: RedisServer, url: str) -> dict[str, Any]:
    """Every call takes 200 ms longer."""
    with Proxy(server.port, folder / f"proxy{dist.get_rank()}") as proxy:
        proxy.set("delay 0.2")
        return Training(proxy.url, timeout=20.0).steps().answer(server)


def calm(folder: Path, binary: str, server: RedisServer, url: str) -> dict[str, Any]:
    return Training(url, timeout=20.0).steps().answer(server)


def two_runs(folder: Path, binary: str, server: RedisServer, url: str) -> dict[str, Any]:
    """Two models on the same batches, step by step in turns, on one server; and the second one alone."""
    first, second = Training(url, timeout=20.0), Training(url, heads=4, timeout=20.0)
    iterators = iter(first.loader), iter(second.loader)
    turns = [training.one_by_one(iterator) for training, iterator in zip((first, second), iterators)]
    for _ in zip(*turns):
        pass
    prefixes = {key.decode().rsplit("/", 3)[0] for key in server.held()}
    dist.barrier()
    for iterator in iterators:
        iterator.close()
    alone = Training("torch", heads=4).steps(stop=len(second.batches)).answer()
    other = second.answer(server)
    return first.answer(server) | {"other": other, "other_alone": alone, "prefixes": sorted(prefixes)}


def resumed(folder: Path, binary: str, server: RedisServer, url: str) -> dict[str, Any]:
    """Stopped after 5 steps, with four plans ahead; a new loader goes on where it was."""
    training = Training(url).steps(stop=5)
    state, half_way = training.loader.state_dict(), digest(training.model)
    after = Training(url)
    after.loader.load_state_dict(state)
    training.loader = after.loader
    return training.steps().answer(server) | {"state": state, "half_way": half_way}


def planner_fails(folder: Path, binary: str, server: RedisServer, url: str) -> dict[str, Any]:
    """The planner raises for one batch, that of step 6."""
    training = Training(url, timeout=20.0)
    rows_of_batch = [training.loader.dataset[i] for i in range(STEPS)]
    bad = [len(row["input_ids"]) for row in rows_of_batch[6]]

    def raising(batch: Any, *args: Any) -> Any:
        if list(batch.lengths) == bad:
            raise RuntimeError("this batch is too odd to be planned")
        return plan_batch(batch, *args)

    planning.plan_batch = raising
    since = time.monotonic()
    try:
        training.steps()
        error = "none"
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    finally:
        planning.plan_batch = plan_batch
    dist.barrier()
    numbers = training.loader.dataset.batches.batches[int(training.loader.dataset.batches.order()[6])].tolist()
    return {"error": error, "steps": len(training.batches), "seconds": time.monotonic() - since, "rows": numbers}


def away_at_start(folder: Path, binary: str, server: RedisServer, url: str) -> dict[str, Any]:
    """Every rank is told what is wrong, also if only one of them can't get there."""
    said = []
    for store in (f"redis://127.0.0.1:{free_port()}/0", url if dist.get_rank() != 2 else url[:-1] + "77"):
        try:
            Training(store)
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return {"said": said}


SCENARIOS = {f.__name__: f for f in (
    calm, killed, frozen, flushed, full, corrupted, slow, two_runs, resumed, planner_fails, away_at_start,
)}  # fmt: skip


def run_scenarios(names: list[str], folder: str, binary: str) -> dict[str, Any]:
    """The answers of this rank, scenario by scenario; rank 0 has a fresh server for each."""
    answers: dict[str, Any] = {"reference": Training("torch", timeout=20.0).steps().answer()}
    for name in names:
        with ExitStack() as stack:
            port = [0]
            server = RedisServer(binary, Path(folder) / f"{name}{dist.get_rank()}")
            if dist.get_rank() == 0:
                stack.enter_context(server)
                port = [server.port]
            dist.broadcast_object_list(port)
            server.port = port[0]
            since = time.monotonic()
            answers[name] = SCENARIOS[name](Path(folder) / name, binary, server, f"redis://127.0.0.1:{port[0]}/0")
            answers[name]["seconds"] = time.monotonic() - since
            dist.barrier()
    return answers


def total(answers: list[dict[str, Any]]) -> Counter[str]:
    """Plans by origin, over all ranks."""
    return Counter(origin for answer in answers for origin in answer["origins"])
