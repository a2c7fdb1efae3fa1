"""A program: the Triton kernels, interpreted on the CPU, against dense attention in fp64. Prints JSON.

It is started by `test_triton.py` with TRITON_INTERPRET=1, which has to be set before kernels are imported.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from hf_dcp.bench import kernel_timing
from hf_dcp.bench.tune import tune
from hf_dcp.planning.planner import plan_batch
from hf_dcp.runtime.cases import Case, Inputs, allowed_of, dense, error_of
from hf_dcp.runtime.checks import tolerance_of
from hf_dcp.runtime.kernels import choose, flash, tile_list, tuning
from hf_dcp.runtime.passes import Features
from hf_dcp.runtime.selftest import MASKS
from hf_dcp.runtime.simulated import SimulatedRanks
from tests.runtime import flash_stub
from tests.runtime.placements import random_placement

HEADS = ((4, 2), (2, 2), (6, 1))
BASE = Case("causal", (43, 14), 16, 4, 2)
CASES = [replace(BASE, mask=mask, heads=HEADS[n % 3][0], kv_heads=HEADS[n % 3][1]) for n, mask in enumerate(MASKS)]
CASES += [
    replace(BASE, mask="lambda:3,33", dtype="bf16"),
    replace(BASE, mask="shared", dtype="fp16", heads=4, kv_heads=1),
    replace(BASE, mask="ranges", dtype="bf16", softcap=2.0, sinks=True),
    replace(BASE, softcap=1.5, backward_kv="keep"),
    replace(BASE, sinks=True, window=20, scale=0.3),
    replace(BASE, mask="full", window=9, reduce_dtype="bf16"),
    replace(BASE, lengths=(3, 1, 2), head_groups=1),
    replace(BASE, lengths=(1,)),
    replace(BASE, lengths=(256,), heads=2, kv_heads=1, block_size=128),
    replace(BASE, mask="ranges", lengths=(211, 40), heads=2, kv_heads=1),  # many rows that attend to nothing
    replace(BASE, head_dim=48, lengths=(20,), heads=2, kv_heads=2),
    replace(BASE, head_dim=80, lengths=(20,), heads=2, kv_heads=1, dtype="bf16"),
]


def small_tiles() -> None:
    """Tiles of tests: small, so that there are many of them, and not the same for all kernels."""
    for kernel, rows, columns in (("forward", 64, 16), ("dq", 32, 32), ("dkv", 64, 32)):
        tuning.SHAPES[kernel] = {256: (tuning.Shape(rows, columns, 4, 1),)}


TWICE = (4, 8, 11)
"""Cases that are executed twice, to be equal to the bit."""
FLASH_CASES = [
    replace(BASE, mask="lambda:3,33", dtype="bf16"),
    replace(BASE, mask="shared", dtype="fp16", heads=4, kv_heads=1, sinks=True),
    replace(BASE, mask="ranges", dtype="bf16", lengths=(30,)),
    replace(BASE, mask="blockwise:16,2,1,1", dtype="bf16", softcap=2.0, backward_kv="keep"),
]
FLASH_WORTH = 60
"""Mean pairs of a segment in tests, so that FlashAttention computes some divisions and Triton others."""


def run(case: Case, world: int, kernel: str = "triton") -> dict[str, Any]:
    """Errors of one case over their tolerance: at most 1 is right."""
    solver = random_placement(case.seed) if world > 1 else None
    plan = plan_batch(case.batch, case.topology(world), case.shape(), case.config(), solver=solver)
    inputs = Inputs.of(case)
    features = Features(case.window, case.scaling, case.softcap, case.backward_kv == "keep")
    ranks = SimulatedRanks(plan.rank_plans, kernel=kernel)
    results = ranks.execute(inputs, features)
    again = ranks.execute(inputs, features) if case.seed in TWICE else results
    print(f"{time.process_time():.1f} s: {case.name}", file=sys.stderr, flush=True)
    lse = results.pop("lse")
    reference, tolerance = dense(case, inputs), tolerance_of(case, inputs)
    empty = torch.cat([~allowed.any(1) for _, allowed in allowed_of(case)])
    return {
        "name": f"{case.name} ranks={world} {kernel}",
        "empty": int(empty.sum()),
        "empty_right": case.sinks or bool((lse.isneginf() == empty[:, None]).all()),
        "same": all(torch.equal(value, again[name]) for name, value in results.items()),
        "over": {n: error_of(case, inputs, results[n], reference[n]) / tolerance[n] for n in results},
    }


def run_wrong() -> dict[str, Any]:
    """The same with ranges that end one column too early: has to be found."""
    masked = tile_list._masked

    def shortened(*arguments: Any) -> Any:
        tiles, ranges = masked(*arguments)
        ranges[..., 1] = (ranges[..., 1] - 1).clip(ranges[..., 0])
        return tiles, ranges

    tile_list._masked = shortened
    try:
        return run(BASE, 1)
    finally:
        tile_list._masked = masked


def run_flash() -> list[dict[str, Any]]:
    """FlashAttention, by a stand-in, and Triton in turns."""
    flash_stub.install()
    flash.WORTH_PAIRS = FLASH_WORTH
    choose.choose_kernel = lambda *_: "flash"  # it refuses to run here
    return [run(replace(case, seed=n), 2, "flash") for n, case in enumerate(FLASH_CASES)]


def main() -> None:
    torch.set_num_threads(1)
    small_tiles()
    results = [run(replace(case, seed=n), 2 if n % 2 else 1) for n, case in enumerate(CASES)]
    kernel_timing.ROUNDS, kernel_timing.WARMUP = 1, 0
    tuned = tune(2, 1, 16, "fp32", "cpu", tokens=24, kernel="triton")
    report = {"cases": results, "wrong": run_wrong(), "tuned": tuned, "flash": run_flash(), "calls": flash_stub.CALLS}
    print(json.dumps(report))


if __name__ == "__main__":
    sys.exit(main())
