"""Measuring rates: attention, its overheads, and the links inside and between nodes, on the ranks of a group or alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hf_dcp.bench.contestants import Contestant
from hf_dcp.bench.group import Group
from hf_dcp.config import DcpConfig
from hf_dcp.masks import causal
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.plan import Op, PassPlan, RankPlan
from hf_dcp.planning.planner import plan_batch
from hf_dcp.rates import Rates

LINKS = {"inter": ("inter_bytes", "latency_s"), "intra": ("intra_bytes", "intra_latency_s")}
"""Kind of link -> the fields of `Rates` that it has."""
MANY, TINY, SHORT = 16, 256, 16
"""Divisions, and tokens, of the calls whose overheads are measured; tokens of very short sequences."""


@dataclass(frozen=True)
class CalibrationSettings:
    """
    Args:
        tokens: length of the causal sequence whose attention is timed.
        message_bytes: size of the largest message.
        repeats: calls, and messages of each size, that count: the median of calls, the fastest of messages.
        assumed: rates that are reported for what can't be measured here: links that the group doesn't have.
    """

    shape: ModelShape
    tokens: int = 4096
    message_bytes: int = 1 << 24
    repeats: int = 5
    assumed: Rates = DcpConfig().rates

    def __post_init__(self) -> None:
        for option, value, least in (("tokens", self.tokens, 1), ("message-bytes", self.message_bytes, 4096)):
            if value < least:
                raise ValueError(f"--{option} must be an integer of at least {least}, not {value}")
        if self.repeats < 1:
            raise ValueError(f"--repeats must be an integer of at least 1, not {self.repeats}")


def calibrate(settings: CalibrationSettings, group: Group) -> dict[str, Any]:
    """Measure what there is: the report, the same on all ranks. Collective.

    All ranks compute at once, and all links of a kind are used at once; the slowest rank counts.

    Returns:
        "rates": the fields of `Rates`; "assumed": those of them that could not be measured; "backward_over_forward": how
        much longer backward takes; and how it was measured.
    """
    measured = _attention(settings, group)
    backward = measured.pop("backward_over_forward")
    for kind, (rate, latency) in LINKS.items():
        pairs = link_pairs(group.topology, foreign=kind == "inter")
        if pairs:
            measured |= zip((rate, latency), _link(pairs, settings, group), strict=True)
    rates = replace(settings.assumed, **measured)
    return {
        "rates": asdict(rates),
        "assumed": [name for name in asdict(rates) if name not in measured],
        "backward_over_forward": backward,
        "world_size": group.world_size,
        "node_of_rank": list(group.topology.node_of_rank),
        "device": group.device.type,
        "tokens": settings.tokens,
        "message_bytes": settings.message_bytes,
        "heads": settings.shape.heads,
        "kv_heads": settings.shape.kv_heads,
        "head_dim": settings.shape.head_dim,
        "dtype": settings.shape.dtype,
        "repeats": settings.repeats,
    }


def _attention(settings: CalibrationSettings, group: Group) -> dict[str, float]:
    """Every rank computes batches of its own: of one sequence, of very short ones, and tiny ones. Collective."""
    long, short, tiny = (settings.tokens,), (SHORT,) * (max(settings.tokens, 2 * TINY) // SHORT), (TINY,)
    whole = _call(_plan(long, settings.shape), settings.repeats, group)
    rows = _call(_plan(short, settings.shape), settings.repeats, group)
    once, often = (_call(_divided(_plan(tiny, settings.shape), n), settings.repeats, group) for n in (1, MANY))
    launch = max(0.0, (often[0] - once[0]) / (MANY - 1))
    # three equations: seconds = overhead + rows * row_s + work / rate
    long_work, short_work, tiny_work = (_work(lengths, settings.shape) for lengths in (long, short, tiny))
    # seconds per FLOP; where the long call takes no longer than the short ones, overheads can't be told from arithmetic
    told = whole[0] > rows[0] and long_work > short_work
    pair = (whole[0] - rows[0]) / (long_work - short_work) if told else whole[0] / long_work
    row = max(0.0, rows[0] - once[0] - (short_work - tiny_work) * pair) / (sum(short) - TINY)
    return {
        "device_flops": 1 / pair,
        "launch_s": launch,
        "call_s": max(0.0, once[0] - launch - TINY * row - tiny_work * pair),
        "row_s": row,
        "backward_over_forward": whole[1] / whole[0],
    }


def _work(lengths: Sequence[int], shape: ModelShape) -> float:
    """FLOPs of causal sequences, forward."""
    return 4 * shape.head_dim * shape.heads * sum(n * (n + 1) / 2 for n in lengths)


def _plan(lengths: Sequence[int], shape: ModelShape) -> RankPlan:
    return plan_batch(BatchSpec(lengths, causal()), Topology((0,)), shape, DcpConfig(block_size=16)).rank(0)


def _divided(plan: RankPlan, divisions: int) -> RankPlan:
    """The plan with its items dealt to so many divisions."""

    def changed(one: PassPlan) -> PassPlan:
        bounds = np.linspace(0, len(one.order), divisions + 1).astype(np.int32)
        steps = [(Op.ATTEND, i) for i in range(divisions)] + [(Op.FINISH, 0)]
        return replace(one, divisions=bounds, program=np.array(steps, np.int32))

    (part,) = plan.windows
    return replace(plan, windows=(replace(part, forward=changed(part.forward), backward=changed(part.backward)),))


def _call(plan: RankPlan, repeats: int, group: Group) -> tuple[float, float]:
    """Seconds of forward and of backward. Collective."""
    contestant = Contestant.of("calibration", plan, group, "refetch", alone=False)
    seconds: list[tuple[float, float]] = []
    for _ in range(repeats + 1):
        group.barrier()
        begin = time.perf_counter()
        out = contestant.forward(contestant.plan)
        _synchronise(group)
        middle = time.perf_counter()
        contestant.backward(out)
        _synchronise(group)
        seconds.append((middle - begin, time.perf_counter() - middle))
    everyone = np.array(group.gather(seconds[1:]))  # [ranks, repeats, 2]
    forward, backward = np.median(everyone.max(0), 0).tolist()
    return forward, backward


def link_pairs(topology: Topology, foreign: bool) -> list[tuple[int, int]]:
    """Who sends to whom so that every device of a node with a partner uses one link, all at once: (sender, receiver).

    Inside a node each rank sends to the next; between nodes to the rank of the same number in the next node, which is
    the first again where that node is smaller.
    """
    members = [np.flatnonzero(topology.node == n).tolist() for n in range(topology.num_nodes)]
    if not foreign:
        rings = [ranks for ranks in members if len(ranks) > 1]
        return [(ranks[i], ranks[(i + 1) % len(ranks)]) for ranks in rings for i in range(len(ranks))]
    if len(members) == 1:
        return []
    following = members[1:] + members[:1]
    return [(rank, there[i % len(there)]) for here, there in zip(members, following) for i, rank in enumerate(here)]


def _link(pairs: Sequence[tuple[int, int]], settings: CalibrationSettings, group: Group) -> tuple[float, float]:
    """(bytes/s, seconds of latency) of the links of these pairs. Collective."""
    sizes = [1, settings.message_bytes]
    small, large = (_exchange(pairs, size, settings.repeats, group) for size in sizes)
    # a message that takes hardly longer than an empty one says little of the rate, and nothing above twice its own
    return sizes[1] / max(large - small, large / 2), small


def _exchange(pairs: Sequence[tuple[int, int]], size: int, repeats: int, group: Group) -> float:
    """Least seconds until the slowest rank has sent and received its messages of ``size`` bytes. Collective."""
    mine = [pair for pair in pairs if group.rank in pair]
    buffers = [torch.zeros(size, dtype=torch.uint8, device=group.device) for _ in mine]

    def post() -> None:
        operations = [
            dist.P2POp(dist.isend, buffer, there) if here == group.rank else dist.P2POp(dist.irecv, buffer, here)
            for buffer, (here, there) in zip(buffers, mine, strict=True)
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    everyone = group.gather([_timed(post, group) for _ in range(repeats + 1)][1:])
    return min(max(times) for times in zip(*everyone, strict=True))


def _timed(work: Callable[[], None], group: Group) -> float:
    group.barrier()
    begin = time.perf_counter()
    work()
    _synchronise(group)
    return time.perf_counter() - begin


def _synchronise(group: Group) -> None:
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
