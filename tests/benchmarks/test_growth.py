"""The table of growth: medians, and bounds of 0 left out one by one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import planner_growth


def entry(number: int, bound: int) -> str:
    seconds = {"total": 0.2, "placement": 0.1, "schedule": 0.1}
    counts = {"tiles": 5, "inter_node_bytes": 10**6, "total_bytes": 3 * 10**6, "plan_bytes": 1024, "bound": bound}
    limits = {"compute_imbalance": 1.0, "token_imbalance": 1.0, "status": "ok"}
    where = {"workload": "magi_default", "batch": number, "tokens": 131072, "devices": 32}
    return json.dumps({**where, "cpu_s": seconds, **counts, **limits})


@pytest.mark.parametrize(("bounds", "shown"), [((2 * 10**6, 0, 10**6), "2.25"), ((0, 0), "–")])
def test_ratios_to_no_bound_are_left_out(bounds: tuple[int, ...], shown: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "growth.jsonl"
    file.write_text("\n".join(entry(i, bound) for i, bound in enumerate(bounds)))
    planner_growth.table(file)
    assert f"| 1 / 3 | {shown} |" in capsys.readouterr().out
