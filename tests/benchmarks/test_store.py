"""The benchmark of the plan store, in small: nothing lost, nothing made twice, nothing left, a bounded number of keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.test_netcluster import cluster, needs_namespaces, own_namespaces

ROOT = Path(__file__).parents[2]


def test_many_iterations() -> None:
    command = [sys.executable, "benchmarks/store.py", "--iterations", "200", "--clients", "4", "--lookahead", "4"]
    command += ["--workers", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["plans"] == {"planned": 200, "fetched": 600, "cached": 0, "replanned": 0}
    assert min(report["planned_by_client"]) > 20  # spread over the clients
    # For three others: 2κ + 2 iterations, and κ + 1 between the first client and the last.
    assert report["most_keys"] <= 3 * (3 * 4 + 3)
    assert report["keys_left"] == 0


@needs_namespaces
@pytest.mark.slow
def test_planners_are_spread_over_a_cluster() -> None:
    before = own_namespaces()
    command = [sys.executable, "benchmarks/store_cluster.py", "--batches", "32"]
    done = cluster(["4", "1", "100", "--", *command], PYTHONPATH=str(ROOT), TIMEOUT_S="200")
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["batches"] == 32 and report["each_made_once"] and report["replanned"] == 0
    assert sum(report["plans_by_node"].values()) == 32 and len(report["plans_by_node"]) == 4
    assert min(report["plans_by_node"].values()) >= 2
    assert own_namespaces() <= before
