"""How much of a pass is exposed exchange, and how much of that its local tiles can't cover."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hf_dcp.planning.batch import RowBytes
from hf_dcp.planning.plan import Item, Message, Op, PassPlan, RankPlan, WindowPlan
from hf_dcp.planning.simulate import item_areas, message_bytes, simulate, unit_flops
from hf_dcp.rates import Rates


@dataclass(frozen=True)
class Exposure:
    """Exchange and compute of one pass, in seconds."""

    exposed_s: float
    """How much longer the pass takes than the busiest rank computes."""
    uncoverable_s: float
    """How much longer than the busiest rank computes a device takes that computes C and waits max(0, F + R - L), the most of
    all. F: its links' time for what has to arrive before its first division that reads a remote row; R: for partial results
    that leave it, or reach it, after its last division; L: its tiles on local rows, all that it can compute meanwhile."""
    exchange_s: float
    """Of the device whose links are busy longest."""
    mean_exchange_s: float
    compute_s: float
    """Of the device that computes longest: exchange beyond that can't be covered by anything."""
    mean_compute_s: float

    @property
    def allowed_s(self) -> float:
        """What a good schedule may expose: what can't be covered, or a tenth of the exchange."""
        return max(self.uncoverable_s, self.exchange_s - self.compute_s, 0.1 * self.exchange_s)


def exposure(rank_plans: Sequence[RankPlan], which: str, rates: Rates, window: int | None = None) -> Exposure:
    """
    Args:
        which: ``"forward"``, ``"backward"`` or ``"backward_keep"``.
    """
    devices = [_Device.of(plan, plan.window(window), which, rates) for plan in rank_plans]
    compute = max(device.compute_s for device in devices)
    return Exposure(
        exposed_s=simulate(rank_plans, which, rates, window).exposed_s,
        uncoverable_s=max(device.compute_s + device.waiting_s for device in devices) - compute,
        exchange_s=max(device.exchange_s for device in devices),
        mean_exchange_s=float(np.mean([device.exchange_s for device in devices])),
        compute_s=compute,
        mean_compute_s=float(np.mean([device.compute_s for device in devices])),
    )


@dataclass(frozen=True)
class _Device:
    compute_s: float
    exchange_s: float
    waiting_s: float
    """max(0, F + R - L)"""

    @classmethod
    def of(cls, plan: RankPlan, part: WindowPlan, which: str, rates: Rates) -> _Device:
        one: PassPlan = part.forward if which == "forward" else part.backward
        seconds = item_areas(part) * unit_flops(plan.shape, plan.head_groups, which) / rates.device_flops
        own = plan.num_local * plan.head_groups
        local = (part.items[:, Item.Q_SLOT] < own) & (part.items[:, Item.KV_SLOT] < own)
        first, last = _bounds(one, local)
        size = message_bytes(one, RowBytes.of(plan.shape, plan.head_groups, plan.reduce_dtype), which)
        node, partial = np.array(plan.node_of_rank), one.messages[:, Message.PARTIAL] == 1
        incoming, exchange = one.messages[:, Message.INCOMING] == 1, one.messages[:, Message.EXCHANGE]
        inside = node[one.messages[:, Message.PEER]] == node[plan.rank]

        def busy(chosen: np.ndarray) -> float:
            """Seconds of the busiest of four queues: in and out, inside the node and between nodes."""
            most = 0.0
            for kind, rate, latency in (
                (inside, rates.intra_bytes, rates.intra_latency_s),
                (~inside, rates.inter_bytes, rates.latency_s),
            ):
                for direction in (incoming, ~incoming):
                    moved = size[chosen & kind & direction]
                    most = max(most, moved.sum() / rate + latency if moved.sum() else 0.0)
            return most

        awaited = busy(incoming & ~partial & np.isin(exchange, first))
        returned = busy(partial & np.isin(exchange, last))
        waiting = max(0.0, awaited + returned - seconds[local].sum())
        return cls(float(seconds.sum()), busy(np.ones(len(size), bool)), float(waiting))


def _bounds(one: PassPlan, local: np.ndarray) -> tuple[list[int], list[int]]:
    """Exchanges that are complete before the first division with a remote row, and those started after the last."""
    program = one.program.tolist()
    remote = [not local[one.order[a:b]].all() for a, b in pairwise(one.divisions)]
    if not any(remote):
        return [], []
    first = next(i for i, (op, argument) in enumerate(program) if op == Op.ATTEND and remote[argument])
    last = max(i for i, (op, argument) in enumerate(program) if op == Op.ATTEND)
    awaited = [argument for op, argument in program[:first] if op == Op.WAIT]
    return awaited, [argument for op, argument in program[last:] if op == Op.START]
