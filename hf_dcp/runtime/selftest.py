"""The self-test: attention, forward and backward, over masks, lengths, block sizes and heads, against dense fp64."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from hf_dcp.planning.planner import plan_batch
from hf_dcp.runtime.cases import Case, Inputs, dense, error_of
from hf_dcp.runtime.checks import described, planned_bytes, run_case, tolerance_of
from hf_dcp.runtime.groups import Communicator
from hf_dcp.runtime.passes import Features
from hf_dcp.runtime.simulated import SimulatedRanks

MASKS = (
    "causal",
    "full",
    "window:17",
    "lambda:3,33",
    "blockwise:16,2,1,1",
    "shared:0.2x4",
    "shared",
    "documents",
    "ranges",
)
"""One of every kind; the last three are made for each length, see `hf_dcp.runtime.cases.resolve_mask`."""
LENGTHS = ((1,), (2, 3), (7,), (3, 5, 7, 11), (257, 129, 1, 64), (2000,))
BLOCK_SIZES = (16, 64)
REFERENCE_TOKENS = 600
"""The numpy reference counts the bytes of longer batches only in the full self-test: it takes seconds for them."""
HEADS = ((8, 2), (4, 4), (6, 1))


def make_cases(masks: Sequence[str] = MASKS, dtype: str = "fp32", full: bool = False) -> list[Case]:
    """All combinations, or a subset in which every mask meets every other value, and all pairs of values occur."""
    if full:
        return [
            Case(mask, lengths, block_size, *heads, dtype=dtype)
            for mask, lengths, block_size, heads in product(masks, LENGTHS, BLOCK_SIZES, HEADS)
        ]
    cases = []
    for m, mask in enumerate(masks):
        for n, lengths in enumerate(LENGTHS):
            block_size = BLOCK_SIZES[(m + n + n // 3) % 2]
            cases.append(Case(mask, lengths, block_size, *HEADS[(m // 2 + n) % 3], dtype=dtype))
    return cases


def run_selftest(
    masks: Sequence[str] | None = None,
    dtype: str = "fp32",
    full: bool = False,
    communicator: Communicator | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Check attention in all cases. Collective over the communicator's group.

    Args:
        masks: mask specifications; None: one of every kind.
        dtype: "fp32", "bf16", "fp16" or "fp64".
        full: every combination of values.
        communicator: the group of ranks; None: this process alone.
        device: where attention runs, "cpu" or "cuda".

    Returns:
        {"cases": [...], "steps": [], "ok": bool}, the same on all ranks; fields of cases: see `run_case`. Training
        steps are added by `hf_dcp.cli.steps`.
    """
    cases = [
        run_case(case, communicator, reference=full or sum(case.lengths) <= REFERENCE_TOKENS, device=device)
        for case in make_cases(masks or MASKS, dtype, full)
    ]
    return {"cases": cases, "steps": [], "ok": all(case["ok"] for case in cases)}


def run_simulated(masks: Sequence[str] | None, dtype: str, full: bool, world_size: int, device: str) -> dict[str, Any]:
    """The same cases with all ranks in this process, on one device: whole plans, kernels and programs, no process group."""
    cases = [simulate_case(case, world_size, device) for case in make_cases(masks or MASKS, dtype, full)]
    return {"cases": cases, "steps": [], "ok": all(case["ok"] for case in cases)}


def simulate_case(case: Case, world_size: int, device: str, kernel: str = "auto") -> dict[str, Any]:
    """One case with simulated ranks: see `hf_dcp.runtime.checks.run_case`."""
    plan = plan_batch(case.batch, case.topology(world_size), case.shape(), case.config())
    inputs = Inputs.of(case)
    ranks = SimulatedRanks(plan.rank_plans, device, kernel)
    results = ranks.execute(inputs, Features(case.window, case.scaling, case.softcap, case.backward_kv == "keep"))
    reference, limits = dense(case, inputs), tolerance_of(case, inputs)
    errors = {name: error_of(case, inputs, results[name], value) for name, value in reference.items()}
    planned = sum(planned_bytes(plan.rank_plans, case.window, case.backward_kv == "keep").values())
    sent = sum(sum(one.stats.sent.values()) for one in ranks.dcp_plans)
    ok = all(errors[name] <= limits[name] for name in errors) and sent == planned
    return {
        **described(case),
        **errors,
        "bytes_planned": planned,
        "bytes_sent": sent,
        "bytes_reference": None,
        "ok": ok,
    }
