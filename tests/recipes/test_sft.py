"""The main job: several processes with DCP give the losses of one process, also of one with dense masks and no DCP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SHORT = ["--max_steps", "4", "--max_length", "700", "--tokens_per_batch", "1500", "--learning_rate", "1e-3"]


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def run(arguments: list[str], processes: int, seconds: float) -> subprocess.CompletedProcess[str]:
    """Launch the recipe as a user would; when time is up, every process dumps its stacks and is ended."""
    launch = ["-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", "recipes/cpu_4.yaml"]
    command = [sys.executable, *launch, "--num_processes", str(processes), "recipes/sft.py", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)
        out, err = process.communicate(timeout=30)
        pytest.fail(f"the recipe took more than {seconds} s:\n{err[-6000:]}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def summary(arguments: list[str], processes: int, work_dir: Path, seconds: float = 240) -> dict[str, Any]:
    folder = work_dir / f"out-{processes}-{'-'.join(arguments).replace('/', '').replace('--', '')}"[:120]
    done = run([*arguments, "--work_dir", str(work_dir), "--output_dir", str(folder), "--json"], processes, seconds)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout)  # nothing else is on standard output


@pytest.mark.timeout(600)
def test_losses_of_two_processes_are_those_of_one_without_dcp(work_dir: Path) -> None:
    arguments = [*SHORT, "--mask", "lambda:16,128"]
    two = summary(arguments, 2, work_dir)
    dense = summary([*arguments, "--attention", "sdpa"], 1, work_dir)
    assert two["steps"] == dense["steps"] == 4
    assert two["losses"] == pytest.approx(dense["losses"], rel=0, abs=1e-5)
    assert two["losses"][-1] < two["losses"][0]
    assert isinstance(two["continuation"], str)
    # Negative control: another mask gives other losses.
    other = summary([*SHORT, "--mask", "window:8", "--attention", "sdpa"], 1, work_dir)
    assert max(abs(a - b) for a, b in zip(two["losses"], other["losses"], strict=True)) > 1e-3


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mask", ["causal", "lambda:64,1024", "blockwise:256,2,1,1", "shared:0.2x4"])
def test_losses_of_thirty_steps_coincide(mask: str, work_dir: Path) -> None:
    four = summary(["--mask", mask], 4, work_dir, 900)
    one = summary(["--mask", mask], 1, work_dir, 900)
    assert four["steps"] == one["steps"] == 30
    assert four["losses"] == pytest.approx(one["losses"], rel=0, abs=1e-5)
    assert four["losses"][-1] < four["losses"][0] - 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mask", "casual"], "unknown mask 'casual'"),
        (["--attention", "flash"], 'attention must be "dcp" or "sdpa"'),
        (["--block_size", "0"], "block_size must be"),
        (["--column", "body", "--max_length", "64"], "no column 'body': use one of path, text"),
        (["--per_device_train_batch_size", "4"], "per_device_train_batch_size"),
    ],
)
def test_wrong_settings_end_before_the_first_step(arguments: list[str], message: str, work_dir: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "recipes/sft.py", "--use_cpu", "--work_dir", str(work_dir), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr[-3000:]
    assert done.stdout == ""
    assert message in done.stderr.splitlines()[-1]
