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
sys.path.insert(0, str(ROOT / "recipes"))
import sft

SHORT = ["--max_steps", "4", "--max_length", "1400", "--tokens_per_batch", "1500", "--learning_rate", "1e-3"]


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


def dense_losses(arguments: list[str], work_dir: Path) -> list[float]:
    """The losses of one process with dense masks, in this process."""
    folders = ["--work_dir", str(work_dir), "--output_dir", str(work_dir / "dense"), "--use_cpu", "--disable_tqdm", "1"]
    settings = sft.parse([*arguments, *folders, "--attention", "sdpa", "--dataloader_num_workers", "0"])
    return sft.train(sft.build(*settings), settings[0])["losses"]


@pytest.mark.timeout(600)
def test_losses_of_two_processes_are_those_of_one_without_dcp(work_dir: Path) -> None:
    mask = ["--mask", "lambda:16,128"]
    two = summary([*SHORT, *mask], 2, work_dir)
    assert two["losses"] == pytest.approx(dense_losses([*SHORT, *mask], work_dir), rel=0, abs=1e-5)
    assert len(two["losses"]) == two["steps"] == 4
    assert two["losses"][-1] < two["losses"][0]
    assert two["statistics"]["intra_node_bytes"] > 0
    assert isinstance(two["continuation"], str)
    # Negative control: another mask gives other losses.
    other = dense_losses([*SHORT, "--mask", "window:8"], work_dir)
    assert max(abs(a - b) for a, b in zip(two["losses"], other, strict=True)) > 1e-3


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mask", ["causal", "lambda:64,1024", "blockwise:256,2,1,1", "shared:0.2x4"])
def test_losses_of_thirty_steps_coincide(mask: str, work_dir: Path) -> None:
    four = summary(["--mask", mask], 4, work_dir, 900)
    one = summary(["--mask", mask], 1, work_dir, 900)
    assert four["steps"] == one["steps"] == 30
    assert four["losses"] == pytest.approx(one["losses"], rel=0, abs=1e-5)
    assert four["losses"][-1] < four["losses"][0] - 1


def test_a_wrong_setting_ends_before_the_first_step(work_dir: Path) -> None:
    done = run(["--mask", "casual", "--work_dir", str(work_dir)], 2, 120)
    assert done.returncode != 0
    assert done.stdout == ""
    said = [line for line in done.stderr.splitlines() if line.startswith("sft.py: ")]
    assert len(said) == 1
    assert "unknown mask 'casual'" in said[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attention", "flash"], 'attention must be "dcp" or "sdpa"'),
        (["--block_size", "0"], "block_size must be"),
        (["--epsilon", "wide"], "epsilon must be a number"),
        (["--dcp_size", "-1"], "dcp_size must be at least"),
        (["--column", "body"], "no column 'body': use one of path, text"),
        (["--mask", "window:0"], "window:0"),
        (["--tokens_per_batch", "0"], "tokens_per_batch must be"),
        (["--model", "smollm2", "--max_length", "1"], "max_length must be at least 2"),
        (["--per_device_train_batch_size", "4"], "per_device_train_batch_size"),
        (["--train_sampling_strategy", "random"], "train_sampling_strategy"),
    ],
)
def test_wrong_settings_are_refused(
    arguments: list[str],
    message: str,
    work_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["sft.py", "--use_cpu", "--work_dir", str(work_dir), *arguments])
    monkeypatch.setattr("models.smollm2", lambda attention: None)
    monkeypatch.setattr("models.smollm2_tokenizer", lambda: None)
    with pytest.raises(SystemExit) as stopped:
        sft.main()
    assert stopped.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    last = output.err.splitlines()[-1]
    assert last.startswith("sft.py: ")
    assert message in last
