"""`hf-dcp selftest`: check attention and a training step on this machine, with as many processes as asked for."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

Option = typer.Option
DTYPES = ("fp32", "bf16", "fp16", "fp64")
SECONDS_PER_CASE = 10.0


def selftest(
    world_size: Annotated[int, Option(help="Processes to start on this machine.")] = 2,
    device: Annotated[str, Option(help="Where attention runs: cpu or cuda.")] = "cpu",
    masks: Annotated[list[str] | None, Option(help="A mask to test; repeat it for more. Default: all kinds.")] = None,
    dtype: Annotated[str, Option(help="Type of Q, K and V: fp32, bf16, fp16 or fp64.")] = "fp32",
    full: Annotated[bool, Option("--full", help="Every combination of masks, lengths, block sizes and heads.")] = False,
    timeout: Annotated[float, Option(help="Seconds until all processes are ended; 0: enough for slow machines.")] = 0.0,
    as_json: Annotated[bool, Option("--json", help="Print JSON, and nothing else, on standard output.")] = False,
) -> int:
    """Compare attention through plans with dense attention in fp64, and a training step with that of one process.

    With --device cuda and fewer GPUs than processes, one process executes the rank plans of all, in turns on one GPU.
    """
    from hf_dcp.runtime.selftest import MASKS, make_cases, run_simulated

    _check(world_size, device, masks, dtype)
    if device == "cuda" and _gpus() < world_size:
        print(f"{_gpus()} GPU(s): {world_size} ranks are simulated on one of them", file=sys.stderr)
        result = run_simulated(masks, dtype, full, world_size, device)
    else:
        from hf_dcp.cli.steps import run_everything
        from hf_dcp.runtime.processes import run_processes

        limit = timeout or 60 + SECONDS_PER_CASE * len(make_cases(masks or MASKS, dtype, full))
        backend = "nccl" if device == "cuda" else "gloo"
        everything = (masks, dtype, full, device)
        result = run_processes(run_everything, world_size, *everything, timeout=limit, backend=backend)[0]
    if as_json:
        print(json.dumps(result))
    else:
        _print(result, world_size)
    return 0 if result["ok"] else 1


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _check(world_size: int, device: str, masks: list[str] | None, dtype: str) -> None:
    from hf_dcp.runtime.cases import resolve_mask
    from hf_dcp.runtime.selftest import LENGTHS

    if world_size < 1:
        raise ValueError(f"--world-size must be at least 1, not {world_size}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, not {device!r}")
    if device == "cuda" and not _gpus():
        raise ValueError("--device cuda: torch finds no CUDA GPU here; write --device cpu, or install torch for CUDA")
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    for mask in masks or []:
        for length in sorted({length for lengths in LENGTHS for length in lengths}):
            resolve_mask(mask, length).ranges(length)  # refuses masks that fit one length only


def _print(result: dict[str, Any], world_size: int) -> None:
    failed = [entry for entry in result["cases"] + result["steps"] if not entry["ok"]]
    for entry in failed:
        print(f"failed: {entry}", file=sys.stderr)
    worst = {name: max((case[name] for case in result["cases"]), default=0.0) for name in ("out", "dq", "dk", "dv")}
    errors = ", ".join(f"{name} {value:.1e}" for name, value in worst.items())
    print(f"{len(result['cases'])} cases and {len(result['steps'])} training steps on {world_size} processes")
    print(f"largest errors: {errors}")
    print("ok" if result["ok"] else f"{len(failed)} failed")
