#!/usr/bin/env python
"""Point to point against one collective call: the uneven messages of real plans, both ways.

    benchmarks/netcluster 4 1 100 -- python benchmarks/exchange.py
    torchrun --nproc-per-node 4 benchmarks/exchange.py

For the exchanges of a plan's forward pass: every receive posted before any send, one message per peer (what the executor
does), and `all_to_all_single` with uneven splits, which takes all ranks, also those that have nothing to exchange.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from hf_dcp.bench.batches import with_mask
from hf_dcp.bench.contestants import make_rank_plans
from hf_dcp.bench.group import Group
from hf_dcp.config import DcpConfig
from hf_dcp.planning.batch import ModelShape, RowBytes
from hf_dcp.planning.plan import Message, RankPlan
from hf_dcp.planning.simulate import message_bytes

SHAPE = ModelShape(heads=8, kv_heads=2, head_dim=64, dtype="fp32")
CASES = [
    ("dcp", [16384], "causal"),
    ("dcp", [16384], "lambda:8,512"),
    ("dcp", [5580, 3000, 2500, 1500, 900, 400], "causal"),
    ("dcp", [5580, 3000, 2500, 1500, 900, 400], "shared:0.2x4"),
    ("zigzag-dense", [16384], "causal"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    group = Group.join()
    try:
        for name, lengths, mask in CASES:
            plans = make_rank_plans(name, with_mask(lengths, mask), group.topology, SHAPE, DcpConfig())
            compare(f"{name} {lengths} {mask}", tables(plans), options.repeats, group)
    finally:
        group.leave()


def tables(plans: Sequence[RankPlan]) -> list[torch.Tensor]:
    """Bytes of each exchange: int64[world, world] by (sender, receiver)."""
    world = len(plans)
    found: dict[int, torch.Tensor] = {}
    row = RowBytes.of(plans[0].shape, plans[0].head_groups)
    for plan in plans:
        part = plan.windows[0].forward
        for message, size in zip(part.messages, message_bytes(part, row, "forward")):
            if not message[Message.INCOMING]:
                table = found.setdefault(int(message[Message.EXCHANGE]), torch.zeros(world, world, dtype=torch.int64))
                table[plan.rank, message[Message.PEER]] += int(size)
    return [found[number] for number in sorted(found)]


def compare(name: str, exchanges: list[torch.Tensor], repeats: int, group: Group) -> None:
    ways: dict[str, Callable[[torch.Tensor, int], None]] = {"messages": point_to_point, "collective": all_to_all}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats + 1):
        for way, function in ways.items():
            group.barrier()
            begin = time.perf_counter()
            for table in exchanges:
                function(table, group.rank)
            times[way].append(max(group.gather(time.perf_counter() - begin)))
    if group.rank == 0:
        sizes = torch.stack(exchanges).flatten()
        sizes = sizes[sizes > 0]
        shape = f"{len(exchanges)} exchanges, {len(sizes)} messages of {sizes.min() / 1e3:.0f} to {sizes.max() / 1e3:.0f} kB"
        result = ", ".join(f"{way} {1e3 * statistics.median(each[1:]):.1f} ms" for way, each in times.items())
        print(f"{name}: {shape}: {result}", flush=True)


def point_to_point(table: torch.Tensor, rank: int) -> None:
    peers = [peer for peer in range(len(table)) if peer != rank]
    works = [
        dist.irecv(torch.empty(int(table[p, rank]), dtype=torch.uint8), p)
        for p in peers
        if table[p, rank]  # type: ignore[arg-type]
    ]
    works += [dist.isend(torch.empty(int(table[rank, p]), dtype=torch.uint8), p) for p in peers if table[rank, p]]
    for work in works:
        assert work is not None
        work.wait()


def all_to_all(table: torch.Tensor, rank: int) -> None:
    sent, received = table[rank].tolist(), table[:, rank].tolist()
    target, source = (torch.empty(sum(sizes), dtype=torch.uint8) for sizes in (received, sent))
    dist.all_to_all_single(target, source, received, sent)


if __name__ == "__main__":
    main()
