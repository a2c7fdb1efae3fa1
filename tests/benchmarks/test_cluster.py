"""The cluster comparison: which cells are measured next, what is made of results, and a cell in namespaces."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from tests.benchmarks.test_netcluster import ROOT, needs_namespaces

SETTING = {"nodes": 4, "per_node": 1, "mbit": 100}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def result(batch: str, mask: str, speedup: float, ceiling: float, foreign: float = 0.0) -> dict[str, Any]:
    one = {"seconds": 0.5, "compute_s": 0.4, "exchange_s": 0.2, "bytes_sent": {"inter": 10**6, "intra": 0}}
    plan = {"forward": one, "backward": one}
    return {
        **SETTING,
        "batch": batch,
        "mask": mask,
        "lengths": [100, 20],
        "foreign_cpu": foreign,
        "rounds": {"dcp": 2, "ring-dense": 1, "zigzag": 1},
        "wire_bytes": 105,
        "wire_planned": 100,
        "plans": {"dcp": plan, "ring-dense": plan, "zigzag": plan},
        "speedups": {
            "dense": {"total": {"best": "ring-dense", "speedup": speedup, "ceiling": ceiling}},
            "row_exact": {"total": {"best": "zigzag", "speedup": speedup - 1}},
        },
    }


def write(file: Path, results: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(one) + "\n" for one in results))
    return file


def test_missing_cells_come_first_and_disturbed_ones_again(tmp_path: Path) -> None:
    cluster = load("cluster")
    batches = tmp_path / "batches.json"
    batches.write_text(json.dumps({"batches": {"a/0": [5], "b/0": [6], "b/1": [7]}}))
    results = [
        result("a/0", "causal", 2, 2),
        result("b/0", "causal", 2, 2, foreign=0.5),
        {**result("a/0", "full", 2, 2), "mbit": 200},
    ]
    options = argparse.Namespace(
        results=write(tmp_path / "results.jsonl", results),
        batches=batches,
        only="/0",
        masks=["causal", "full"],
        foreign=0.1,
    )
    missing = cluster.find_missing(options, SETTING)
    assert missing == [["a/0", "full", [5]], ["b/0", "full", [6]], ["b/0", "causal", [6]]]


def test_candidates_are_the_best_by_prediction() -> None:
    cluster = load("cluster")
    predicted = {
        name: float(i) for i, name in enumerate([*reversed(cluster.DENSE), *reversed(cluster.ROW_EXACT), "dcp"])
    }
    names = cluster.choose(predicted, sequences=3)
    assert names == ["dcp", *cluster.DENSE[:-3:-1], cluster.ROW_EXACT[-1]]
    assert cluster.choose(predicted, sequences=1)[-1] == "zigzag"


def test_report_takes_the_least_disturbed_try_and_shows_losses(tmp_path: Path) -> None:
    report = load("cluster_report")
    tries = [
        result("a/0", "causal", 9, 9, foreign=0.4),
        result("a/0", "causal", 4, 5),
        result("b/0", "causal", 0.9, 1),
        result("a/0", "lambda:8,512", 4, 8),
    ]
    cells = report.read([write(tmp_path / "results.jsonl", tries)])
    assert [cell.dense["speedup"] for cell in cells] == [4, 4, 0.9]
    text = report.report(cells)
    assert "| causal | 2 | 2.45 (0.90 – 4.00) | 3.00 | 0.85 | 1 of 1 |" in text
    assert "| lambda:8,512 | 1 | 4.00 (4.00 – 4.00) | 8.00 | 0.50 | 1 of 1 |" in text
    assert "- b, causal: 0.90 x ring-dense (dense)" in text and "- b, causal: -0.10 x zigzag (row-exact)" in text
    assert "all 3 cells: **0.80**" in text and "1.050 to 1.050" in text
    page = tmp_path / "page.md"
    (tmp_path / "images").mkdir()
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.plot(cells, tmp_path / "images" / "cluster.png")
    assert (tmp_path / "images" / "cluster.png").stat().st_size > 10_000


@needs_namespaces
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("nodes", "per_node"), [(2, 1), (2, 2), (3, 2), (4, 2)])
def test_planned_bytes_are_sent_and_seen_on_the_wire(tmp_path: Path, nodes: int, per_node: int) -> None:
    batches = tmp_path / "batches.json"
    batches.write_text(json.dumps({"batches": {"a/0": [3000, 1500, 300]}}))
    command = [sys.executable, str(ROOT / "benchmarks" / "cluster.py"), "--mbit", "1000", "--batches", str(batches)]
    command += ["--nodes", str(nodes), "--per-node", str(per_node), "--results", str(tmp_path / "results.jsonl")]
    done = subprocess.run([*command, "--masks", "causal"], capture_output=True, text=True, timeout=350, check=False)
    assert done.returncode == 0, done.stderr
    cell = json.loads((tmp_path / "results.jsonl").read_text())
    for plan in cell["plans"].values():
        for which in ("forward", "backward"):
            assert plan[which]["bytes_sent"] == plan[which]["bytes_planned"]
    assert cell["wire_planned"] < cell["wire_bytes"] < 1.08 * cell["wire_planned"] + 1e6
