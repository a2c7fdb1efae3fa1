"""Every recipe in a short form on two processes: its loss falls, and its summary compares DCP with zigzag."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.multiprocess import run_ranks

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(900)  # the first test runs all cases
sys.path.insert(0, str(ROOT / "recipes"))
TRAINER = ["--dataloader_num_workers", "0", "--disable_tqdm", "1", "--learning_rate", "3e-3", "--warmup_steps", "0"]
PAIRS = ["--per_device_train_batch_size", "6"]  # of one question
QUESTION = {"question": "a", "answers": ["a", "b"]}
LONG = {"question": "a b c d", "answers": ["a", "b"]}
TEXTS = ["--max_steps", "4", "--max_tokens", "400"]
RECIPES: dict[str, list[str]] = {
    "dpo_shared_question": ["--max_steps", "4", "--max_tokens", "512", "--questions", "2", *PAIRS, *TRAINER],
    "reward_shared_question": ["--max_steps", "6", "--max_tokens", "512", "--questions", "2", *PAIRS, *TRAINER],
    "icl_blockwise": [*TEXTS, "--shots", "12", "--block", "32", *TRAINER],
    "long_context_lambda": [*TEXTS, "--sink", "4", "--window", "64", "--documents", "1", *TRAINER],
    "custom_mask": [*TEXTS, *TRAINER],
    "raw_accelerate_loop": [*TEXTS, "--workers", "0", "--accumulation", "2", "--learning_rate", "3e-3"],
}


def short_forms(folder: str) -> str:
    """The summaries of all recipes, one after the other in these processes."""
    from tests.integrations.test_trainer import fresh

    sys.path.insert(0, str(ROOT / "recipes"))
    answers = {}
    for name, arguments in RECIPES.items():
        fresh()
        places = ["--work_dir", folder]
        if "raw" not in name:
            places += ["--output_dir", f"{folder}/{name}"]
        go, _ = importlib.import_module(name).build([*arguments, *places])
        answers[name] = go()
    return json.dumps(answers)


@pytest.fixture(scope="module")
def summaries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("recipes")
    return json.loads(run_ranks(short_forms, 2, str(folder), timeout=500)[0])


@pytest.mark.parametrize("name", RECIPES)
def test_loss_falls_and_the_summary_compares(name: str, summaries: dict[str, Any]) -> None:
    summary = summaries[name]
    losses = summary["losses"]
    assert len(losses) == int(RECIPES[name][1])
    assert losses[-1] < losses[0]
    if "question" in name:  # two questions in turn
        assert losses[-2] < losses[0] and losses[-1] < losses[1]
    here, planned = summary["comparisons"]
    assert (here["nodes"], here["devices"]) == (1, 2)
    assert (planned["nodes"], planned["devices"]) == (2, 4 * 2)
    for comparison in (here, planned):
        assert 1 <= comparison["batches"] <= 4
        for scheme in ("dcp", "zigzag"):
            assert 0 <= comparison[scheme]["inter_node_bytes"] <= comparison[scheme]["bytes"]
            assert comparison[scheme]["compute_imbalance"] >= 1
        assert comparison["dcp"]["bytes"] <= comparison["zigzag_dense_bytes"]
    assert planned["dcp"]["inter_node_bytes"] <= planned["zigzag"]["inter_node_bytes"]


def test_masks_say_what_the_recipes_say() -> None:
    custom = importlib.import_module("custom_mask")
    ranges = custom.ranges_of({"input_ids": [0] * 7, "starts": [2, 5]})
    seen = [{j for lo, hi in row for j in range(lo, hi)} for row in ranges.tolist()]
    assert seen == [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}, {0, 1, 5}, {0, 1, 5, 6}]
    packed = importlib.import_module("long_context_lambda").packed
    rows = [{"input_ids": [i] * n, "length": n} for i, n in enumerate((3, 4, 9, 2))]
    assert [row["document_lengths"] for row in packed(rows, 8)] == [[3, 4], [9], [2]]


@pytest.mark.parametrize(
    ("name", "arguments", "rows", "message"),
    [
        ("dpo_shared_question", [], [{"question": "q", "answers": []}], "row 0 has 0 answers"),
        ("dpo_shared_question", [], [{"question": "q", "texts": ["a"]}], "row 0 has no 'answers'"),
        ("dpo_shared_question", ["--max_tokens", "3"], [QUESTION, LONG], "row 1 has a question of"),
        ("icl_blockwise", [], [{"examples": [{"input": "a", "output": "b"}]}], "the data set has no column 'test'"),
        ("icl_blockwise", ["--aligned", "words"], None, 'aligned must be "tokens" or "examples"'),
        ("custom_mask", ["--column", "body"], [{"text": "x = 1"}], "the data set has no column 'body'"),
        ("long_context_lambda", ["--window", "0"], None, "window must be an integer of at least 1"),
    ],
)
def test_bad_settings_and_rows_are_one_sentence(
    name: str,
    arguments: list[str],
    rows: list[dict[str, Any]] | None,
    message: str,
    tmp_path: Path,
    summaries: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    common, recipe = importlib.import_module("common"), importlib.import_module(name)
    given = ["--work_dir", summaries[name]["options"]["work_dir"], "--output_dir", str(tmp_path), *arguments]
    if rows is not None:
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given += ["--dataset", str(data)]
    monkeypatch.setattr(sys, "argv", [name, *given])
    with pytest.raises(SystemExit) as stopped:
        common.run(name, recipe.build)
    assert stopped.value.code == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"{name}: ")]
    assert len(said) == 1
    assert message in said[0]


@pytest.mark.parametrize("name", RECIPES)
def test_the_head_of_a_recipe_has_its_commands_and_output(name: str) -> None:
    text = (ROOT / "recipes" / f"{name}.py").read_text()
    head = text.split('"""')[1]
    assert f"accelerate launch --config_file recipes/cpu_4.yaml recipes/{name}.py" in head
    assert "Expected output" in head
    for config in re.findall(r"recipes/\w+\.yaml", head):
        assert (ROOT / config).exists()


@pytest.mark.parametrize("name", ["cpu_4", "gpu_8", "gpu_2x8", "fsdp2_8", "fsdp2_2x8"])
def test_accelerate_reads_the_files(name: str) -> None:
    from accelerate.commands.config import load_config_from_file

    path = ROOT / "recipes" / f"{name}.yaml"
    config = load_config_from_file(str(path))
    assert config.num_processes == yaml.safe_load(path.read_text())["num_processes"]
    if name.startswith("fsdp2"):
        assert config.fsdp_config["fsdp_version"] == 2


os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
