"""The Triton kernels in Triton's interpreter (no GPU needed): exact, deterministic, empty rows as agreed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.timeout(1000)  # a minute or two on an idle machine
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results():
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.runtime.triton_cases"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_all_cases_are_exact(results):
    assert len(results["cases"]) >= 20
    wrong = [case for case in results["cases"] if not max(case["over"].values()) <= 1]
    assert not wrong


def test_rows_that_attend_to_nothing_have_lse_minus_infinity(results):
    assert all(case["empty_right"] for case in results["cases"])
    assert sum(case["empty"] for case in results["cases"]) > 20, "there are such rows"


def test_results_are_the_same_to_the_bit(results):
    assert all(case["same"] for case in results["cases"])


def test_a_wrong_mask_is_found(results):
    assert min(results["wrong"]["over"].values()) > 1


def test_flash_attention_and_triton_in_turns_are_exact(results):
    wrong = [case for case in results["flash"] if not max(case["over"].values()) <= 1 or not case["empty_right"]]
    assert len(results["flash"]) == 4 and not wrong
    assert {call["pass"] for call in results["calls"]} == {"forward", "backward"}
    kinds = {(left >= 0, right >= 0) for left, right in (call["window"] for call in results["calls"])}
    assert len(kinds) >= 3, "full, causal and band slices were called"
    assert max(call["segments"] for call in results["calls"]) > 1, "several slices in one call"


def test_tuning_times_every_shape(results):
    assert [entry["kernel"] for entry in results["tuned"]] == ["forward", "dq", "dkv"]
    assert all(list(entry["ms"]) == [entry["shape"]] and entry["ms"][entry["shape"]] > 0 for entry in results["tuned"])
