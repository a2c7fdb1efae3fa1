"""`hf-dcp env`: versions and devices, to paste into an issue."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

PACKAGES = (
    "hf-dcp", "torch", "transformers", "accelerate", "datasets", "trl", "numpy", "scipy", "numba", "mtkahypar",
    "kahypar", "redis", "flash-attn", "triton", "safetensors",
)  # fmt: skip


def env(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Versions, devices and solvers on this machine."""
    facts = describe()
    if as_json:
        print(json.dumps(facts))
        return
    for name, value in facts.items():
        print(f"{name:<14} {value}")


def describe() -> dict[str, str | int | None]:
    """Name -> version or fact; None for a package that is not installed."""
    facts: dict[str, str | int | None] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
    }
    for package in PACKAGES:
        facts[package] = _version(package)
    facts["gpus"] = _gpus()
    return facts


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpus() -> str:
    try:
        import torch
    except ImportError:
        return "unknown: torch is not installed"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join(names) if names else "none"
