"""Every command and every Python block of README and docs is parsed; test_commands.py runs the commands."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[tuple[str, str]]:
    """(page and number, text) of every fenced block of a language."""
    found = []
    for page in PAGES:
        matches = [m.group(2) for m in BLOCK.finditer(page.read_text("utf-8")) if m.group(1) == language]
        found += [(f"{page.relative_to(ROOT)}:{i}", text) for i, text in enumerate(matches)]
    return found


def commands() -> list[tuple[str, list[str]]]:
    """Every command line of every shell block, split into words."""
    found = []
    for name, text in blocks("bash"):
        lines = text.replace("\\\n", " ").splitlines()
        found += [(f"{name}.{i}", shlex.split(line, comments=True)) for i, line in enumerate(lines) if line.strip()]
    return found


def program(words: list[str]) -> str:
    return Path(words[0]).name


@pytest.mark.parametrize(("name", "words"), commands(), ids=lambda value: value if isinstance(value, str) else "")
def test_command(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    if program(words) == "hf-dcp":
        check_hf_dcp(words[1:], capsys)
    elif program(words) == "accelerate":
        check_launch(words[1:], monkeypatch)
    elif program(words) == "bash":
        assert (ROOT / words[1]).is_file()
    else:
        assert program(words) in ("pip", "python", "mkdocs"), f"{name}: say here how to check {words[0]}"
        assert all((ROOT / word).is_file() for word in words if word.endswith(".py"))


def check_hf_dcp(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The options are those of the command; test_commands.py runs it."""
    from hf_dcp.cli.main import run

    assert run([*words[: 2 if words[0] == "bench" else 1], "--help"]) == 0
    listed = capsys.readouterr().out
    assert all(word in listed for word in words if word.startswith("--"))


def check_launch(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch configuration is one that Accelerate reads, and the recipe's arguments are ones that it takes."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    assert words[:2] == ["launch", "--config_file"]
    load_config_from_file(str(ROOT / words[2]))
    script = next(i for i, word in enumerate(words) if word.endswith(".py"))
    launch_command_parser().parse_args(words[1 : script + 1])
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    monkeypatch.setenv("WORLD_SIZE", "1")
    if words[script] != "recipes/sft.py":
        check_options(Path(words[script]).stem, words[script + 1 :])
        return
    import sft

    arguments = [word for word in words[script + 1 :] if word != "--bf16"] + ["--use_cpu"]
    recipe, training, _ = sft.parse(arguments)
    assert training.per_device_train_batch_size == 1
    if "--max_steps" in words:
        assert training.max_steps == int(words[words.index("--max_steps") + 1])
    if "--mask" in words:
        assert recipe.mask == words[words.index("--mask") + 1]


def check_options(recipe: str, words: list[str]) -> None:
    """Options of the other recipes: their own, or training arguments."""
    import importlib
    from dataclasses import fields

    from transformers import TrainingArguments

    known = {
        field.name for kind in (importlib.import_module(recipe).Options, TrainingArguments) for field in fields(kind)
    }
    assert {word[2:] for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize(("name", "text"), blocks("python"), ids=lambda value: value if ":" in value[:60] else "")
def test_python_block(name: str, text: str) -> None:
    """Every block compiles, and every name that it takes from hf_dcp is there."""
    import hf_dcp

    tree = ast.parse(text, name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hf_dcp":
            assert hasattr(hf_dcp, node.attr), f"{name}: hf_dcp has no {node.attr}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_dcp"):
            module = __import__(node.module, fromlist=["x"])
            assert all(hasattr(module, alias.name) for alias in node.names), f"{name}: {ast.unparse(node)}"


@pytest.mark.parametrize("page", ["README.md", "docs/howto/own-data.md"])
def test_the_trainer_script_trains(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script that users copy, with a small model and small rows put in, on one process."""
    (text,) = (text for name, text in blocks("python") if name.startswith(page) and "trainer.train()" in text)
    rows = [{"input_ids": list(range(3, 3 + n)), "length": n} for n in (40, 7, 19, 1, 33, 25)]
    monkeypatch.chdir(tmp_path)
    save_small_model("model")
    text = text.replace("dcp_size=8", "dcp_size=1").replace("tokens_per_batch=131072", "tokens_per_batch=64")
    scope = {"name": "model", "rows": Dataset.from_list(rows)}
    exec(compile(text, page, "exec"), scope)
    losses = [entry["train_loss"] for entry in scope["trainer"].state.log_history if "train_loss" in entry]
    assert len(losses) == 1
    assert 0 < losses[0] < 10


def save_small_model(folder: str) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    vocabulary = {"<pad>": 0} | {chr(60 + i): i for i in range(1, 64)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(folder)


def test_the_mask_example_runs() -> None:
    (text,) = (text for _, text in blocks("python") if "every token attends to the first token" in text)
    scope: dict[str, object] = {}
    exec(compile(text, "own-mask.md", "exec"), scope)
    assert scope["mask"].ranges(6)[3].tolist() == [[0, 1], [2, 4]]  # type: ignore[attr-defined]


def test_the_figure_of_a_placed_batch_is_drawn_from_a_real_plan(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from docs.figures import one_batch

    plan = one_batch.example_plan()
    plan.check()
    one_batch.draw(plan, tmp_path / "batch.png")
    assert (tmp_path / "batch.png").stat().st_size > 10_000
    image, owners = one_batch.device_image(plan, 0), one_batch.token_owners(plan, 0)
    assert set(owners.tolist()) <= {0, 1, 2, 3}
    attended = sum(min(i + 1, 512) + min(64, max(i + 1 - 512, 0)) for i in range(1536))  # window, and sink before it
    assert int((image >= 0).sum()) == attended


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_the_figures_of_the_concept_guide_are_drawn_from_real_plans(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from docs.figures import concepts

    assert concepts.dense("window:3", 5).sum(1).tolist() == [1, 2, 3, 3, 3]
    concepts.tiles(tmp_path / "tiles.png")
    scenes = {name: concepts.make_scene(plans, concepts.RATES) for name, plans in concepts.contestants().items()}
    sent = {name: sum(map(sum, scene.passes["forward"].bytes)) for name, scene in scenes.items()}
    assert sent["DCP"] < sent["the same, only rows that are read"] < sent["zigzag ring, as published"]
    concepts.moved(scenes, tmp_path / "moved.png")
    concepts.timelines(scenes, tmp_path / "timelines.png")
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("tiles", "moved", "timelines"))
