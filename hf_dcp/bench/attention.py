"""The attention benchmark: batches x masks, every combination with all contestants in one run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_dcp.bench.batches import Named, attended, with_mask
from hf_dcp.bench.compare import speedups, summary
from hf_dcp.bench.contestants import check_names, make_contestants
from hf_dcp.bench.group import Group
from hf_dcp.bench.measure import collect, measure, trace
from hf_dcp.bench.spans import trace_names
from hf_dcp.config import DcpConfig
from hf_dcp.planning.batch import BatchSpec, ModelShape


@dataclass(frozen=True)
class Settings:
    """
    Args:
        names: contestants, of `hf_dcp.bench.contestants.NAMES`.
        alone: also measure compute and exchange alone, for the ceilings.
        tracing: return a Chrome trace too, of the last round of the last batch.
    """

    names: tuple[str, ...]
    shape: ModelShape
    config: DcpConfig
    repeats: int = 5
    warmup: int = 1
    alone: bool = True
    tracing: bool = False

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"--repeats must be an integer of at least 1, not {self.repeats}")
        if self.warmup < 0:
            raise ValueError(f"--warmup must be an integer of at least 0, not {self.warmup}")


def bench_attention(
    batches: Sequence[Named], masks: Sequence[str], settings: Settings, group: Group
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure everything: the report, the same on all ranks, and the trace's events. Collective."""
    check_names(settings.names, group.world_size)
    cases = [(mask, name, with_mask(lengths, mask)) for mask in masks for name, lengths in batches]
    results: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for number, (mask, name, batch) in enumerate(cases):
        if group.rank == 0:
            print(f"batch {name}, {mask}: {number + 1} of {len(cases)}", file=sys.stderr, flush=True)
        result, events = _one(batch, settings, group)
        results.append({"mask": mask, "batch": name, **result})
    report = {
        "world_size": group.world_size,
        "node_of_rank": list(group.topology.node_of_rank),
        "heads": settings.shape.heads,
        "kv_heads": settings.shape.kv_heads,
        "head_dim": settings.shape.head_dim,
        "dtype": settings.shape.dtype,
        "backward_kv": settings.config.backward_kv,
        "repeats": settings.repeats,
        "results": results,
        "summary": summary(results),
    }
    return report, trace_names(group.world_size, group.topology.node_of_rank) + events


def _one(batch: BatchSpec, settings: Settings, group: Group) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    contestants = make_contestants(settings.names, batch, group, settings.shape, settings.config, settings.alone)
    timings = measure(contestants, group, settings.repeats, settings.warmup)
    reports = {c.name: collect(c, timing, group) for c, timing in zip(contestants, timings, strict=True)}
    result = {
        "lengths": list(batch.lengths),
        "attended": attended(batch),
        "causal": sum(n * (n + 1) // 2 for n in batch.lengths),
        "plans": reports,
        "speedups": speedups(reports),
    }
    return result, trace(contestants, timings, group) if settings.tracing else []
