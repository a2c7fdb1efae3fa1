"""What plans are compared with: static schemes, as published and row by row, and single solvers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hf_dcp.config import PLACEMENTS, DcpConfig
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.objective import COSTED, Score
from hf_dcp.planning.placement import solve
from hf_dcp.planning.plan import Plan
from hf_dcp.planning.static import SCHEMES, dense_bytes

SOLVERS = tuple(name for name in PLACEMENTS if name not in (*SCHEMES, "auto"))
RIVALS = (*SCHEMES, *SOLVERS)
STATIC = ",".join(SCHEMES)
Bytes = dict[str, dict[str, int]]
"""Pass -> "inter_node_bytes", "intra_node_bytes", "max_device_bytes"."""


def parse_rivals(text: str) -> tuple[str, ...]:
    """Names with commas between; none for an empty text.

    Raises:
        ValueError: for an unknown name, or one that is there twice.
    """
    names = tuple(text.split(",")) if text else ()
    for name in names:
        base, _, inner = name.partition(":")
        if base not in RIVALS or (inner and (base != "loongtrain" or not inner.isdecimal() or int(inner) < 1)):
            raise ValueError(
                f"--against must name some of {', '.join(RIVALS)}, or loongtrain:4 for inner rings of 4, not {name!r}"
            )
    if len(set(names)) != len(names):
        raise ValueError(f"--against must name each once, not {text}")
    return names


def rivals(plan: Plan, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Bytes of the named rivals for the plan's batch. Those that fit neither heads nor ranks are left out.

    Returns:
        name -> "dense", for static schemes: what they send as published, whatever the mask; and "row_exact": bytes of
        the same token placement (or of the solver's) under our rules, with its imbalances. Each has a "cost", and its
        "ratio": the plan's cost over it.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        base, _, inner = name.partition(":")
        entry: dict[str, Any] = {}
        with suppress(ValueError):
            if base in SCHEMES:
                entry["dense"] = _dense(plan, base, int(inner) if inner else None)
            if base in PLACEMENTS and not inner:
                entry["row_exact"] = _row_exact(plan, base)
        if entry:
            found[name] = entry
    return found


def scheme_bytes(
    name: str,
    batch: BatchSpec,
    topology: Topology,
    shape: ModelShape,
    config: DcpConfig,
    inner: int | None = None,
) -> Bytes:
    """Bytes of a published static scheme over all layers."""
    layers = sum(layers for _, layers in shape.windows)
    call = dense_bytes(name, batch, topology, shape, config.reduce_dtype, inner=inner)
    return {which: {key: value * layers for key, value in entry.items()} for which, entry in call.items()}


def score_bytes(score: Score) -> Bytes:
    """What a score counts, in the words of reports."""
    names = ("inter_node_bytes", "intra_node_bytes", "max_device_bytes")
    parts = {which: score.passes[which] for which in COSTED}
    return {
        which: dict(zip(names, (p.inter_node, p.intra_node, p.max_device), strict=True)) for which, p in parts.items()
    }


def cost_of(sent: Bytes, topology: Topology, backward_kv: str) -> int:
    """The one cost: bytes of forward and backward, each times the relative cost of its links."""
    passes = ("forward", "backward" if backward_kv == "refetch" else "backward_keep")
    return sum(
        topology.inter_cost * sent[which]["inter_node_bytes"] + topology.intra_cost * sent[which]["intra_node_bytes"]
        for which in passes
    )


def ratio(value: float, other: float) -> float | None:
    """``value / other``; 1 where both are 0, None where only the other is."""
    if other:
        return value / other
    return None if value else 1.0


def _compared(plan: Plan, sent: Bytes) -> dict[str, Any]:
    cost = cost_of(sent, plan.topology, plan.config.backward_kv)
    return {**sent, "cost": cost, "ratio": ratio(plan.score.cost, cost)}


def _dense(plan: Plan, name: str, inner: int | None) -> dict[str, Any]:
    return _compared(plan, scheme_bytes(name, plan.batch, plan.topology, plan.shape, plan.config, inner))


def _row_exact(plan: Plan, name: str) -> dict[str, Any]:
    since = time.process_time()
    score = solve(plan.batch, plan.topology, plan.shape, plan.config.with_changes(placement=name)).score
    return {
        **_compared(plan, score_bytes(score)),
        "compute_imbalance": score.compute_imbalance,
        "token_imbalance": score.token_imbalance,
        "within_limits": score.excess == 0,
        "placement_cpu_s": time.process_time() - since,
    }


def best_rivals(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The cheapest rival of each kind.

    Returns:
        "dense"; "row_exact", whatever its balance; and "balanced", of those within the limits. Each "name" and "ratio".
    """
    kinds = {"dense": "dense", "row_exact": "row_exact", "balanced": "row_exact"}
    best = {}
    for kind, key in kinds.items():
        entries = {name: entry[key] for name, entry in found.items() if key in entry}
        if kind == "balanced":
            entries = {name: entry for name, entry in entries.items() if entry["within_limits"]}
        if entries:
            name = min(entries, key=lambda n: entries[n]["cost"])
            best[kind] = {"name": name, "ratio": entries[name]["ratio"]}
    return best
