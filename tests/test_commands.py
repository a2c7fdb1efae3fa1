"""Every command of README and docs is run as it stands, in a folder with the files that it names, or is listed with the
reason why not. What takes more than some seconds is slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

from hf_dcp.cli.main import run as run_here
from tests.test_docs import ROOT, commands, program, save_small_model

NOT_RUN = {
    "*pip install *": "installs from the package index, as scripts/setup.sh does for every test run",
    "bash scripts/test.sh*": "runs these tests",
    "bash scripts/test_oldest.sh*": "installs older libraries and runs these tests with them",
    "bash recipes/quickstart.sh*": "makes an environment, and launches what another page has, which is run",
    "* --config_file recipes/gpu_*": "needs eight GPUs; options are parsed in test_docs.py, recipes run in tests/recipes",
    "* --config_file recipes/fsdp2_*": "needs eight GPUs; options are parsed in test_docs.py, FSDP2 runs in tests/integrations",
    "* recipes/sft.py --model smollm2 *": "takes minutes a step on a CPU; tests/recipes/test_models.py loads the model",
    "mkdocs *": "is a step of continuous integration, or serves until it is stopped",
    "python benchmarks/*": "a study of minutes to hours; its parts are tested in tests/benchmarks",
    "python recipes/figures.py*": "draws over the pages' images; tests/benchmarks/test_analysis.py calls it elsewhere",
    "benchmarks/netcluster *": "needs root and iproute2; tests/benchmarks/test_netcluster.py starts it",
    "torchrun *": "a study of minutes; the command that it starts is tested in tests/bench",
}
QUICK = ("plan", "env", "estimate", "view")
"""Commands of hf-dcp that are run by default."""
STANDS_FOR = {"Qwen/Qwen3-0.6B": "model", "NAME": "model"}
"""Names on the hub, and the folder of the small model that is used for them."""
SHORTER = {"--max_steps": "4"}
"""Options of a training that are given other values."""
TEXTS = ["def add(a, b):\n    return a + b\n" * n for n in (3, 40, 1, 12, 7, 300)]


@dataclass(frozen=True)
class Command:
    """A command of a page; those of one page run in one folder, in order."""

    name: str
    words: list[str]

    @property
    def page(self) -> str:
        return self.name.partition(":")[0]

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def reasons(self) -> list[str]:
        """Why it is not run."""
        return [reason for pattern, reason in NOT_RUN.items() if fnmatch(self.text, pattern)]

    @property
    def is_quick(self) -> bool:
        return program(self.words) == "hf-dcp" and self.words[1] in QUICK


EVERYTHING = [Command(name, words) for name, words in commands()]
RUN = [one for one in EVERYTHING if not one.reasons]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Page -> the folder that its commands run in."""
    return {page: _folder(tmp_path_factory) for page in {one.page for one in EVERYTHING}}


def _folder(factory: pytest.TempPathFactory) -> Path:
    folder = factory.mktemp("page")
    (folder / "my_texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    (folder / "batches.json").write_text("[[4096, 700], [512, 300, 200]]")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    save_small_model(str(folder / "model"))
    return folder


def run(command: Command, folder: Path, seconds: float) -> str:
    """Standard output of the command, which must succeed."""
    words = [STANDS_FOR.get(word, word) for word in command.words]
    for option, value in SHORTER.items():
        if option in words:
            words[words.index(option) + 1] = value
    if program(words) == "accelerate":
        words = ["-m", "accelerate.commands.accelerate_cli", *words[1:]]
        words += [] if "--max_steps" in words else ["--max_steps", "2"]
    elif program(words) == "hf-dcp":
        words = ["-m", "hf_dcp.cli", *words[1:]]
    else:
        assert program(words) == "python", f"{command.name}: say here how to run {words[0]}, or list it in NOT_RUN"
        words = words[1:]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, f"{command.text}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.parametrize("command", [one for one in RUN if one.is_quick], ids=lambda one: one.name)
def test_quick_command(
    command: Command,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folders[command.page])
    assert run_here([STANDS_FOR.get(word, word) for word in command.words[1:]]) == 0
    out = capsys.readouterr().out
    if "--json" in command.words:
        json.loads(out)
    for option in ("--out", "--html", "--save"):
        for i, word in enumerate(command.words):
            if word == option:
                assert (folders[command.page] / command.words[i + 1]).exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", [one for one in RUN if not one.is_quick], ids=lambda one: one.name)
def test_slow_command(command: Command, folders: dict[str, Path]) -> None:
    out = run(command, folders[command.page], 580)
    if "--json" in command.words:
        json.loads(out)
    if "--dcp_trace" in command.words:
        trace = folders[command.page] / command.words[command.words.index("--dcp_trace") + 1]
        assert json.loads(trace.read_text("utf-8"))["traceEvents"]


def test_every_command_is_run_or_has_one_reason_not_to() -> None:
    assert len(RUN) >= 15
    for one in EVERYTHING:
        assert len(one.reasons) <= 1, f"{one.name} has several reasons not to be run: {one.reasons}"
    for one in RUN:
        assert program(one.words) in ("hf-dcp", "accelerate", "python"), f"{one.name}: {one.text}"


def test_a_wrong_command_would_be_found(folders: dict[str, Path]) -> None:
    page = next(iter(folders.values()))
    with pytest.raises(AssertionError, match="no-such-option"):
        run(Command("none:0.0", ["hf-dcp", "plan", "--lengths", "8", "--no-such-option"]), page, 120)
