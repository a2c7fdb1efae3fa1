"""`hf-dcp env`: versions, devices, solvers and stores found, to paste into an issue."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Annotated

import typer

PACKAGES = (
    "hf-dcp", "torch", "transformers", "accelerate", "datasets", "trl", "numpy", "scipy", "numba", "mtkahypar",
    "kahypar", "redis", "flash-attn", "triton", "safetensors", "peft", "matplotlib",
)  # fmt: skip
SOLVERS = ("mtkahypar", "kahypar")
"""Packages of solvers beside the package's own search."""


def env(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Versions, devices, solvers and plan stores on this machine."""
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
    facts["solvers"] = ", ".join(["own search", *(name for name in SOLVERS if find_spec(name) is not None)])
    facts["plan stores"] = ", ".join(_stores())
    facts["settings"] = ", ".join(sorted(name for name in os.environ if name.startswith("HF_DCP_"))) or "none"
    return facts


def _stores() -> list[str]:
    """What plans can be exchanged through. Addresses and passwords are not shown."""
    stores = [] if find_spec("torch") is None else ["torch's TCPStore"]
    return stores if find_spec("redis") is None else [*stores, "Redis (client installed)"]


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
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    if not found:
        return f"none; torch was built for {'CUDA ' + torch.version.cuda if torch.version.cuda else 'the CPU'}"
    names = [f"{one.name} ({one.total_memory / 2**30:.0f} GiB, sm_{one.major}{one.minor})" for one in found]
    return f"{', '.join(names)}; CUDA {torch.version.cuda}"
