"""What is worth knowing of a plan, small enough to travel with every rank plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from hf_dcp.planning.batch import ModelShape, RowBytes
from hf_dcp.planning.plan import Message, PassPlan, Plan, RankPlan


@dataclass(frozen=True)
class PlanReport:
    """Sums over the ranks of a group for one batch; bytes are those of all layers, forward and backward, once each."""

    tokens: int
    max_rank_tokens: int
    empty_ranks: int
    forward_inter_bytes: int
    """Bytes between nodes."""
    forward_intra_bytes: int
    """Bytes inside nodes."""
    backward_inter_bytes: int
    backward_intra_bytes: int
    ring_bytes: int
    """What the dense static ring sends for the same tokens: every KV row to every rank, whatever the mask."""
    compute_imbalance: float
    """Attended elements of the busiest rank / mean."""
    token_imbalance: float
    plan_s: float
    """CPU seconds of planning."""

    @property
    def inter_bytes(self) -> int:
        return self.forward_inter_bytes + self.backward_inter_bytes

    @property
    def intra_bytes(self) -> int:
        return self.forward_intra_bytes + self.backward_intra_bytes

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> PlanReport:
        """Inverse of `to_json`. Raises ValueError for anything else."""
        values = json.loads(text)
        names = {f.name for f in fields(cls)}
        if not isinstance(values, dict) or values.keys() != names:
            raise ValueError("a plan report must have the fields " + ", ".join(sorted(names)))
        for name, value in values.items():
            wanted = (int, float) if isinstance(value, float) or name.endswith(("imbalance", "_s")) else (int,)
            if isinstance(value, bool) or not isinstance(value, wanted) or value < 0:
                raise ValueError(f"{name} of a plan report must be a number of at least 0, not {value!r}")
        return cls(**values)

    @classmethod
    def of(cls, plan: Plan) -> PlanReport:
        """The report of a whole plan."""
        local = np.array([rank_plan.num_local for rank_plan in plan.rank_plans], np.int64)
        sent = {
            (which, link): sum(
                sent_bytes(rank_plan, which, plan.config.backward_kv)[link] for rank_plan in plan.rank_plans
            )
            for which in ("forward", "backward")
            for link in ("inter", "intra")
        }
        return cls(
            tokens=plan.batch.num_tokens,
            max_rank_tokens=int(local.max()),
            empty_ranks=int((local == 0).sum()),
            forward_inter_bytes=sent["forward", "inter"],
            forward_intra_bytes=sent["forward", "intra"],
            backward_inter_bytes=sent["backward", "inter"],
            backward_intra_bytes=sent["backward", "intra"],
            ring_bytes=ring_bytes(plan.shape, plan.batch.num_tokens, len(local), plan.config.reduce_dtype),
            compute_imbalance=_imbalance(_areas(plan)),
            token_imbalance=_imbalance(local),
            plan_s=float(sum(plan.cpu_s.values())),
        )


def sent_bytes(plan: RankPlan, which: str, backward_kv: str = "refetch") -> dict[str, int]:
    """Bytes that a rank sends in one ``"forward"`` or ``"backward"`` of all layers: {"inter": ..., "intra": ...}."""
    rows = RowBytes.of(plan.shape, plan.head_groups, plan.reduce_dtype)
    name = "backward_keep" if which == "backward" and backward_kv == "keep" else which
    kinds = np.array([rows.inputs(name), rows.partials(name)], np.int64)
    node = np.array(plan.node_of_rank)
    total = {"inter": 0, "intra": 0}
    for part, (_, layers) in zip(plan.windows, plan.shape.windows):
        passes: PassPlan = getattr(part, which)
        out = passes.messages[passes.messages[:, Message.INCOMING] == 0].astype(np.int64)
        count = np.stack(
            [
                _rows(passes.q_runs, out[:, Message.Q_BEGIN], out[:, Message.Q_END]),
                _rows(passes.kv_runs, out[:, Message.KV_BEGIN], out[:, Message.KV_END]),
            ],
            1,
        )
        size = (count * kinds[out[:, Message.PARTIAL]]).sum(1) * layers
        inter = node[out[:, Message.PEER]] != node[plan.rank]
        total["inter"] += int(size[inter].sum())
        total["intra"] += int(size[~inter].sum())
    return total


def ring_bytes(shape: ModelShape, tokens: int, world_size: int, reduce_dtype: str | None) -> int:
    """Bytes of a dense static ring over all layers: KV makes R - 1 hops in both passes, dKV makes R hops."""
    if world_size == 1:
        return 0
    rows = RowBytes.of(shape, 1, reduce_dtype)
    layers = sum(count for _, count in shape.windows)
    return layers * tokens * (2 * (world_size - 1) * rows.kv + world_size * rows.partial_kv)


def _rows(runs: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Rows of the runs [begin, end) of each message."""
    total = np.concatenate([[0], np.cumsum(runs[:, 1], dtype=np.int64)])
    return total[end] - total[begin]


def _areas(plan: Plan) -> np.ndarray:
    """Attended elements by device, weighted by layers: int64[world_size]."""
    total = np.zeros(plan.topology.world_size, np.int64)
    for tiles, device, (_, layers) in zip(plan.tiles, plan.placement.tile_device, plan.shape.windows):
        for group in range(device.shape[1]):
            np.add.at(total, device[:, group], tiles.area * layers)
    return total


def _imbalance(values: np.ndarray | Sequence[int]) -> float:
    mean = float(np.mean(values))
    return float(np.max(values)) / mean if mean else 1.0
