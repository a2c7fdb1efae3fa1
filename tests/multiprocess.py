"""Tests in several processes: a hard time-out with a dump of all stacks, and no process left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_dcp.runtime.processes import ProcessFailure, run_processes

__all__ = ["ProcessFailure", "run_processes", "run_ranks"]


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0, **options: Any
) -> list:
    """The results of ``function(*args)`` on every rank of a gloo group of new processes; see `run_processes`."""
    return run_processes(function, world_size, *args, timeout=timeout, **options)
