"""Many iterations through a plan store: does anything grow, is any plan lost or made twice, how many plans per second?

    python benchmarks/store.py --iterations 10000 --clients 8 --plot docs/images/store.png

Starts a Redis server, and clients that each stand for one rank of a group. Every client asks for the plan of every batch,
at most κ batches before the slowest one; its workers, processes as a DataLoader has them, take turns. All batches differ.
Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import redis
from redis_server import serve

import hf_dcp
from hf_dcp.lookahead.depth import Depth, derive_depth
from hf_dcp.lookahead.planning import PlanSettings, PlanSource
from hf_dcp.lookahead.redis_settings import RedisSettings
from hf_dcp.lookahead.store import StoreAddress
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.planner import plan_batch

SHAPE = ModelShape(4, 2, 64, "bf16")
CONFIG = hf_dcp.DcpConfig(block_size=128, placement="zigzag")


@dataclass(frozen=True)
class Setup:
    """How many batches, clients, and workers of each."""

    iterations: int
    clients: int
    depth: Depth


def batch(i: int) -> BatchSpec:
    """A batch that differs from all others."""
    return BatchSpec([1024 + i % 512, 512 + i // 512], hf_dcp.causal())


def worker(rank: int, number: int, setup: Setup, url: str, progress: Any, answers: Any) -> None:
    """Every so-manieth batch of one client. ``progress``: the last batch of each worker of each client."""
    settings = RedisSettings.parse(url)
    source = PlanSource(
        PlanSettings(
            topology=Topology.grid(2, setup.clients // 2),
            shape=SHAPE,
            config=CONFIG,
            rank=rank,
            communicator=None,
            address=StoreAddress("redis", f"{settings.prefix}/benchmark", redis=settings),
            keep=-(-setup.depth.keep // setup.depth.workers),
        )
    )
    store_bytes, longest, troubles = 0, 0.0, Counter()
    mine = rank * setup.depth.workers + number
    for i in range(number, setup.iterations, setup.depth.workers):
        while i > min(progress) + setup.depth.lookahead + 1:
            time.sleep(0.005)
        plan = source.get(batch(i))
        store_bytes += plan.store_bytes
        longest = max(longest, plan.wait_s)
        if plan.trouble:
            troubles[f"{plan.origin}: {plan.trouble}"] += 1
        progress[mine] = i
    progress[mine] = setup.iterations
    while min(progress) < setup.iterations:
        time.sleep(0.01)
    source.close()
    answers.put(
        {
            "rank": rank,
            "counts": dict(source.counts),
            "cpu_s": time.process_time(),
            "store_bytes": store_bytes,
            "longest_wait_s": longest,
            "troubles": troubles,
        }
    )


def sample(server: redis.Redis, processes: list[psutil.Process], done: int, since: float) -> dict[str, float]:
    alive = [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    memory = [process.memory_info() for process in alive]
    return {
        "iteration": done,
        "seconds": time.perf_counter() - since,
        "keys": server.dbsize(),
        "server_bytes": server.info("memory")["used_memory"],
        "client_bytes": max((m.rss - m.shared for m in memory), default=0),
        "threads": max((process.num_threads() for process in alive), default=0),
    }


def measure(setup: Setup) -> dict[str, Any]:
    plan_batch(batch(0), Topology.grid(2, setup.clients // 2), SHAPE, CONFIG)  # compiled before the fork
    context = multiprocessing.get_context("fork")
    with serve() as port:
        url = f"redis://127.0.0.1:{port}/0"
        count = setup.clients * setup.depth.workers
        progress, answers = context.Array("q", [0] * count, lock=False), context.Queue()
        workers = [
            context.Process(
                target=worker, args=(*divmod(i, setup.depth.workers), setup, url, progress, answers), daemon=True
            )
            for i in range(count)
        ]
        since = time.perf_counter()
        for process in workers:
            process.start()
        server, processes = redis.Redis(port=port), [psutil.Process(process.pid) for process in workers]
        samples = []
        while min(progress) < setup.iterations and all(process.is_alive() for process in workers):
            samples.append(sample(server, processes, min(progress), since))
            time.sleep(max(0.2, setup.iterations / 10_000))
        reports = [answers.get(timeout=60) for _ in workers]
        seconds = time.perf_counter() - since
        for process in workers:
            process.join(20)
        cpu = server.info("cpu")
        left = server.dbsize()
    return summarise(setup, reports, samples, seconds, left, cpu)


def summarise(
    setup: Setup, reports: list[dict], samples: list[dict], seconds: float, left: int, cpu: dict
) -> dict[str, Any]:
    total = {
        name: sum(r["counts"].get(name, 0) for r in reports) for name in ("planned", "fetched", "cached", "replanned")
    }
    client_s = sum(r["cpu_s"] for r in reports)
    half, end = samples[len(samples) // 2], samples[-1]
    made: Counter[int] = Counter()
    for report in reports:
        made[report["rank"]] += report["counts"].get("planned", 0)
    return {
        "iterations": setup.iterations,
        "clients": setup.clients,
        "workers": setup.depth.workers,
        "lookahead": setup.depth.lookahead,
        "plans": total,
        "planned_by_client": [made[rank] for rank in range(setup.clients)],
        "troubles": sum((Counter(r["troubles"]) for r in reports), Counter()),
        "longest_wait_s": max(r["longest_wait_s"] for r in reports),
        "seconds": seconds,
        "client_cpu_s": client_s,
        "server_cpu_s": cpu["used_cpu_user"] + cpu["used_cpu_sys"],
        "plans_per_core_second": setup.iterations / client_s,
        "deliveries_per_core_second": setup.iterations * setup.clients / client_s,
        "store_bytes_per_plan": sum(r["store_bytes"] for r in reports) / 2 / setup.iterations,
        "most_keys": max(s["keys"] for s in samples),
        "keys_left": left,
        "growth": {
            name: end[name] / max(half[name], 1) for name in ("keys", "server_bytes", "client_bytes", "threads")
        },
        "samples": samples,
    }


def plot(report: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(12, 2.6), constrained_layout=True)
    done = [s["iteration"] for s in report["samples"]]
    for axis, (name, unit, label) in zip(
        axes,
        (
            ("keys", 1, "keys in the store"),
            ("server_bytes", 1e6, "server memory, MB"),
            ("client_bytes", 1e6, "memory of the largest worker, MB"),
            ("threads", 1, "threads of a worker"),
        ),
    ):
        axis.plot(done, [s[name] / unit for s in report["samples"]], lw=1)
        axis.set_ylim(0)
        axis.set_title(label, fontsize=9)
        axis.set_xlabel("iteration", fontsize=8)
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2, help="of each client")
    parser.add_argument("--lookahead", type=int, default=8)
    parser.add_argument("--plot", type=Path, help="file for the figure")
    options = parser.parse_args()
    report = measure(Setup(options.iterations, options.clients, derive_depth(options.lookahead, options.workers, None)))
    if options.plot:
        plot(report, options.plot)
    print(json.dumps({name: value for name, value in report.items() if name != "samples"}))


if __name__ == "__main__":
    main()
