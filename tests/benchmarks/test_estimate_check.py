"""The check of estimates: a measurement that equals the prediction is off by nothing, another one is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.estimate_check import check, read, table
from hf_dcp.planning.simulate import Rates

RATES = Rates(1e10, 1e7, 1e9, launch_s=1e-3)
REPORT = {"world_size": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "fp32", "node_of_rank": [0, 1]}


def result(dcp: float, zigzag: float) -> dict:
    plans = {"dcp": dcp, "zigzag-dense": zigzag}
    halves = {name: {which: {"seconds": s / 2} for which in ("forward", "backward")} for name, s in plans.items()}
    return {"batch": "a", "mask": "causal", "lengths": [700, 300], "plans": halves}


def test_what_is_measured_as_predicted_is_right() -> None:
    first = check(REPORT, result(1.0, 2.0), RATES)
    assert first.ratios[0] == 2.0
    again = check(REPORT, result(*first.predicted), RATES)
    assert again.error == pytest.approx(0)
    slower = check(REPORT, result(2 * first.predicted[0], first.predicted[1]), RATES)
    assert slower.error == pytest.approx(1.0)
    assert "+100% |" in table([slower])


def test_both_kinds_of_files_are_read(tmp_path: Path) -> None:
    report, lines = tmp_path / "report.json", tmp_path / "lines.jsonl"
    lonely = {**result(1, 2), "plans": {"dcp": {}}}
    report.write_text(json.dumps({**REPORT, "results": [result(1, 2), lonely]}))
    lines.write_text("\n".join(json.dumps({"nodes": 2, "per_node": 2, "mbit": 100, **result(1, 2)}) for _ in range(2)))
    ((found, one),) = read(report)
    assert found["node_of_rank"] == [0, 1]
    assert one["lengths"] == [700, 300]
    assert [found["node_of_rank"] for found, _ in read(lines)] == [[0, 0, 1, 1]] * 2
