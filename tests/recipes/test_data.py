"""Texts, tokenizer and rows of the recipes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from datasets import Dataset

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
from data.rows import open_dataset, tokenise
from data.text import make_once, standard_library, standard_library_tokenizer, train_tokenizer

CHAT = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["def add(a, b):\n    return a + b\n"] * 4, 300)


def test_standard_library_is_made_once_and_round_trips(tmp_path: Path) -> None:
    texts = standard_library(tmp_path, num_files=12)
    assert texts["text"] == standard_library(tmp_path, num_files=12)["text"]
    assert len(set(texts["path"])) == 12
    assert not [
        p for p in tmp_path.iterdir() if p.name != f"stdlib-{sys.version_info.major}.{sys.version_info.minor}-12"
    ]


def test_tokenizer_encodes_any_text(tokenizer) -> None:
    for text in ("import os\n", "ünïcode 漢字 \x00", "  tabs\t"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.slow
def test_standard_library_tokenizer(tmp_path: Path) -> None:
    tokenizer = standard_library_tokenizer(tmp_path)
    assert len(tokenizer) == 4096
    text = standard_library(tmp_path)["text"][0]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer(text)["input_ids"]) < len(text) / 2


def test_text_rows_end_and_are_cut(tokenizer) -> None:
    rows = tokenise(Dataset.from_dict({"body": ["a b", "", "x" * 50], "other": [1, 2, 3]}), tokenizer, "body", 10)
    assert rows.column_names == ["input_ids", "length"]
    assert rows["length"] == [len(ids) for ids in rows["input_ids"]]
    assert rows["length"][-1] == 10
    assert len(rows) == 2
    assert rows["input_ids"][0][-1] == tokenizer.eos_token_id


def test_chats_go_through_the_template(tokenizer) -> None:
    tokenizer.chat_template = CHAT
    chat = [{"role": "user", "content": "add 1"}, {"role": "assistant", "content": "2"}]
    rows = tokenise(Dataset.from_dict({"messages": [chat]}), tokenizer, "messages", 100)
    assert tokenizer.decode(rows["input_ids"][0]) == "user:add 1\nassistant:2\n"
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        tokenise(Dataset.from_dict({"messages": [chat]}), tokenizer, "messages", 100)


@pytest.mark.parametrize(
    ("data", "column", "message"),
    [
        ({"text": ["a"]}, "body", "no column 'body': use one of text"),
        ({"text": [3]}, "text", "must hold strings, or chats"),
        ({"text": []}, "text", "no rows"),
        ({"text": ["", ""]}, "text", "no row of column 'text' has a token"),
    ],
)
def test_bad_data_is_refused(tokenizer, data: dict, column: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tokenise(Dataset.from_dict(data), tokenizer, column, 10)


def test_files_and_folders_are_opened(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"text": t}) for t in ("one", "two")))
    assert open_dataset(str(file), "train")["text"] == ["one", "two"]
    Dataset.from_dict({"text": ["three"]}).save_to_disk(str(tmp_path / "saved"))
    assert open_dataset(str(tmp_path / "saved"), "train")["text"] == ["three"]
    (tmp_path / "rows.xml").write_text("")
    with pytest.raises(ValueError, match="must end in one of .json"):
        open_dataset(str(tmp_path / "rows.xml"), "train")


def test_a_second_builder_is_harmless(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "mine").write_text("late")
        target.mkdir()
        (target / "theirs").write_text("first")

    target = tmp_path / "made"
    assert make_once(target, build) == target
    assert [p.name for p in tmp_path.iterdir()] == ["made"]
    assert [p.name for p in target.iterdir()] == ["theirs"]
