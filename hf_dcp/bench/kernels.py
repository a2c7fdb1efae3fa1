"""`hf-dcp bench kernels`: every kernel of this device checked against fp64, and timed against what else there is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from hf_dcp.bench.kernel_contestants import CONTESTANTS, Problem, Unsuitable
from hf_dcp.bench.kernel_timing import measure, synchronise
from hf_dcp.masks import parse_mask
from hf_dcp.ranges import normalise
from hf_dcp.runtime.cases import Case
from hf_dcp.runtime.messages import DTYPES
from hf_dcp.runtime.selftest import simulate_case

MASKS = ("causal", "lambda:64,4096", "blockwise:256,2,1,1", "shared:0.2x4")
CHECKED_MASKS = ("shared", "ranges", "causal", "lambda:3,33", "blockwise:16,2,1,1", "documents")
"""Masks of the checks against fp64: on CPUs, where the self-test has all of them, the first two."""
TOKENS = (8192, 16384, 32768, 65536)
MATMUL = {"cuda": 8192, "cpu": 1024}
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5
"""Matrix products per attended pair and head dim; each is two floating-point operations."""


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Args:
        tokens: lengths of the one sequence that is attended over.
        seconds: after so many, what is left is reported as skipped.
    """

    device: str
    tokens: Sequence[int] = TOKENS
    masks: Sequence[str] = MASKS
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bf16"
    seconds: float = 200.0


def bench_kernels(settings: Settings) -> dict[str, Any]:
    """Check and time: {"device", "versions", "matmul_tflops", "checks", "times", "seconds", "ok"}."""
    since = time.monotonic()
    torch.manual_seed(0)
    rate = matmul_rate(settings)
    checks = check_kernels(settings)
    times = []
    for tokens in settings.tokens:
        for mask in settings.masks:
            if time.monotonic() - since > settings.seconds:
                times.append({"tokens": tokens, "mask": mask, "skipped": f"{settings.seconds:.0f} s are over"})
            else:
                times += time_kernels(settings, tokens, mask, rate)
    return {
        "device": device_name(settings.device),
        "versions": versions(),
        "settings": {"heads": f"{settings.heads}:{settings.kv_heads}", "head_dim": settings.head_dim}
        | {"dtype": settings.dtype},
        "matmul_tflops": rate,
        "checks": checks,
        "times": times,
        "seconds": time.monotonic() - since,
        "ok": all(check["ok"] for check in checks),
    }


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def versions() -> dict[str, str | None]:
    """Of what the figures depend on."""
    from importlib.metadata import version

    names = ("torch", "triton", "flash_attn", "kernels")
    found: dict[str, str | None] = {n: version(n.replace("_", "-")) if find_spec(n) else None for n in names}
    return found | {"cuda": torch.version.cuda}


def kernels_of(device: str) -> list[str]:
    """The kernels of this package that can run here."""
    if device == "cpu":
        return ["aten"]
    return ["triton"] + ["flash"] * bool(find_spec("flash_attn") or find_spec("kernels"))


def check_kernels(settings: Settings) -> list[dict[str, Any]]:
    """Every kernel on short batches with 4 simulated ranks, for every mask and head dim, against fp64."""
    dims = (settings.head_dim,) if settings.device == "cpu" else (64, 80, 96, 128, 192, 256)
    masks = CHECKED_MASKS[:2] if settings.device == "cpu" else CHECKED_MASKS
    checks = []
    for kernel in kernels_of(settings.device):
        for n, mask in enumerate(masks):
            dim = dims[n % len(dims)]
            plain = Case(mask, (257, 129, 1, 64), 64, 8, (2, 8, 1)[n % 3], dtype=settings.dtype, head_dim=dim, seed=n)
            for case in (plain, Case(mask, (300,), 64, 4, 4, settings.dtype, dim, softcap=5.0, sinks=True, seed=n)):
                checks.append({"kernel": kernel} | simulate_case(case, 4, settings.device, kernel))
    return checks


def matmul_rate(settings: Settings) -> float:
    """TFLOP/s of one large matrix product in the type that is measured."""
    n = MATMUL[settings.device]
    a, b = (torch.randn(n, n, device=settings.device, dtype=DTYPES[settings.dtype]) for _ in range(2))
    return 2 * n**3 / measure(lambda: a @ b, settings.device) / 1e12


def time_kernels(settings: Settings, tokens: int, mask: str, rate: float) -> list[dict[str, Any]]:
    """One row per contestant and pass: {"tokens", "mask", "kernel", "pass", "ms", "tflops", "of_matmul"}."""
    ranges = normalise(parse_mask(mask).ranges(tokens))
    area = int((ranges[..., 1] - ranges[..., 0]).astype(np.int64).sum())
    problem = Problem(settings, tokens, mask, ranges)
    rows: list[dict[str, Any]] = []
    for name, make in CONTESTANTS.items():
        row: dict[str, Any] = {"tokens": tokens, "mask": mask, "kernel": name}
        try:
            forward, backward = make(problem)
            seconds = {"forward": measure(forward, settings.device), "backward": measure(backward, settings.device)}
        except (Unsuitable, torch.OutOfMemoryError, RuntimeError) as error:
            rows.append(row | {"skipped": str(error).splitlines()[0]})
            continue
        for which, products in (("forward", FORWARD_PRODUCTS), ("backward", BACKWARD_PRODUCTS)):
            flops = 2 * products * area * settings.heads * settings.head_dim
            tflops = flops / seconds[which] / 1e12
            figures = {"ms": seconds[which] * 1e3, "tflops": tflops, "of_matmul": tflops / rate}
            rows.append(row | {"pass": which} | figures)
        del forward, backward
        synchronise(settings.device)
    return rows
