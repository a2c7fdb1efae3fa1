"""The plan store fails in every way we know of; training ends with the parameters of an undisturbed run, to the bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.lookahead.chaos import run_scenarios
from tests.lookahead.servers import binary
from tests.multiprocess import run_ranks

os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
WORLD = 4
Answers = dict[str, list[dict[str, Any]]]


def run(names: list[str], folder: Path, version: str) -> Answers:
    """For each scenario, the answers of all ranks."""
    results = run_ranks(run_scenarios, WORLD, names, str(folder), binary(version), timeout=280)
    return {name: [result[name] for result in results] for name in results[0]}
