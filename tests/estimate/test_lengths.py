"""Lengths of rows, from everything that may hold them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_dcp.estimate import lengths as module
from hf_dcp.estimate.lengths import Lengths, read_lengths

WORDS = [["a"] * n for n in (3, 1, 0, 7, 2)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One token per word."""
    folder = str(tmp_path_factory.mktemp("tokenizer"))
    made = Tokenizer(models.WordLevel({"?": 0, "a": 1}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?").save_pretrained(folder)
    return folder


def json_lines(file: Path, rows: list[dict]) -> str:
    file.write_text("\n".join(json.dumps(row) for row in rows), "utf-8")
    return str(file)


@pytest.mark.parametrize(
    "content",
    [[5, 3, 9], {"lengths": [5, 3, 9]}, [[5, 3], [9]], {"batches": {"x": [5, 3], "y": [9]}},
     {"sequences": [{"length": 5}, {"length": 3, "mask": "full"}, {"length": 9}]}, {"x": [5], "y": [3, 9]}],
)  # fmt: skip
def test_listed_lengths(content: object, tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps(content))
    assert read_lengths(str(file)).tokens.tolist() == [5, 3, 9]
    assert read_lengths("5, 3,9").tokens.tolist() == [5, 3, 9]


def test_columns_of_numbers_ids_and_texts(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"n": len(w), "ids": [1] * len(w), "words": " ".join(w)} for w in WORDS]
    for name in (json_lines(tmp_path / "rows.jsonl", rows), str(tmp_path / "rows.parquet"), str(tmp_path / "saved")):
        if name.endswith("parquet"):
            Dataset.from_list(rows).to_parquet(name)
        elif name.endswith("saved"):
            Dataset.from_list(rows).save_to_disk(name)
        for column in ("n", "ids", "words"):
            found = read_lengths(name, column, tokenizer=tokenizer)
            assert found.tokens.tolist() == [3, 1, 7, 2], (name, column)


def test_the_usual_columns_are_found(tmp_path: Path) -> None:
    assert read_lengths(json_lines(tmp_path / "a.jsonl", [{"text": "abcdefgh", "length": 5}])).tokens.tolist() == [5]
    found = read_lengths(json_lines(tmp_path / "b.jsonl", [{"text": "abcdefghi"}]))
    assert found.tokens.tolist() == [3]
    assert "4 characters per token (no tokenizer)" in found.source


def test_most_rows_are_estimated_from_those_counted(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 200, 400).tolist()
    name = json_lines(tmp_path / "a.jsonl", [{"text": " ".join(["a"] * n)} for n in sizes])
    exact = read_lengths(name, tokenizer=tokenizer)
    assert exact.tokens.tolist() == sizes
    monkeypatch.setattr(module, "COUNTED", 50)
    seen = []
    rough = read_lengths(name, tokenizer=tokenizer, progress=lambda *report: seen.append(report))
    assert "50 rows counted" in rough.source
    assert np.abs(rough.tokens - sizes).max() <= 2
    assert (rough.tokens == sizes).sum() > 40
    assert seen[-1] == ("counting tokens", 50, 50)


def test_chats(tmp_path: Path, tokenizer: str) -> None:
    chat = [{"role": "user", "content": "a a"}, {"role": "assistant", "content": "a"}]
    name = json_lines(tmp_path / "a.jsonl", [{"messages": chat}])
    with pytest.raises(ValueError, match="has no chat template"):
        read_lengths(name, tokenizer=tokenizer)
    assert read_lengths(name).tokens.tolist() == [1]


def test_a_sample_is_drawn_by_seed() -> None:
    listed = ",".join(str(n) for n in range(1, 1001))
    first, again, other = (read_lengths(listed, rows=50, seed=seed).tokens for seed in (1, 1, 2))
    assert first.tolist() == again.tolist()
    assert first.tolist() != other.tolist()
    assert len(set(first.tolist())) == 50
    assert 300 < first.mean() < 700


def test_long_rows_are_cut() -> None:
    lengths = Lengths(np.array([5, 80, 9]), "list")
    assert lengths.cut(80) is lengths
    assert lengths.cut(8).tokens.tolist() == [5, 8, 8]
    assert lengths.cut(8).source.endswith("2 rows cut at 8 tokens")


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"body": "x"}], {}, "name the column with --column: the data set has body"),
        ([{"body": "x"}], {"column": "text"}, "no column 'text': use --column with one of body"),
        ([{"text": 1.5}], {}, "must hold strings, or chats"),
        ([{"length": -1}], {}, "negative length"),
        ([{"length": 0}], {}, "no row has a token"),
        ([{"text": "x"}], {"tokenizer": "/nowhere"}, "--tokenizer /nowhere can't be read"),
        ([{"text": "x"}], {"rows": 0}, "--rows must be an integer of at least 1"),
    ],
)
def test_what_is_refused(rows: list[dict], options: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_lengths(json_lines(tmp_path / "a.jsonl", rows), **options)


def test_no_such_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="can't be opened"):
        read_lengths(str(tmp_path / "nowhere.parquet"))
