"""What is worth knowing of a plan, small enough to travel with every rank plan."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from hf_dcp.planning.batch import ModelShape, RowBytes
from hf_dcp.planning.plan import Plan


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
        local = [rank_plan.num_local for rank_plan in plan.rank_plans]
        forward = plan.score.passes["forward"]
        backward = plan.score.passes["backward_keep" if plan.config.backward_kv == "keep" else "backward"]
        return cls(
            tokens=plan.batch.num_tokens,
            max_rank_tokens=max(local),
            empty_ranks=local.count(0),
            forward_inter_bytes=forward.inter_node,
            forward_intra_bytes=forward.intra_node,
            backward_inter_bytes=backward.inter_node,
            backward_intra_bytes=backward.intra_node,
            ring_bytes=ring_bytes(plan.shape, plan.batch.num_tokens, len(local), plan.config.reduce_dtype),
            compute_imbalance=plan.score.compute_imbalance,
            token_imbalance=plan.score.token_imbalance,
            plan_s=float(sum(plan.cpu_s.values())),
        )


def ring_bytes(shape: ModelShape, tokens: int, world_size: int, reduce_dtype: str | None) -> int:
    """Bytes of a dense static ring over all layers: KV makes R - 1 hops in both passes, dKV makes R hops."""
    if world_size == 1:
        return 0
    rows = RowBytes.of(shape, 1, reduce_dtype)
    layers = sum(count for _, count in shape.windows)
    return layers * tokens * (2 * (world_size - 1) * rows.kv + world_size * rows.partial_kv)
