"""Lengths of the rows of a data set, in tokens: read, counted, or estimated from counted ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CHUNK = 64
COUNTED = 2000
"""Rows that are tokenised; those beyond get their tokens from their characters."""
CHARACTERS_PER_TOKEN = 4.0
"""Where there is no tokenizer."""
Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done, in total)."""


@dataclass(frozen=True)
class Lengths:
    """
    Args:
        tokens: int64[rows].
        source: how they were come by, for reports.
    """

    tokens: np.ndarray
    source: str

    def cut(self, longest: int) -> Lengths:
        """With longer rows cut at so many tokens."""
        above = int((self.tokens > longest).sum())
        if not above:
            return self
        return Lengths(np.minimum(self.tokens, longest), f"{self.source}; {above:,} rows cut at {longest:,} tokens")


def read_lengths(
    dataset: str,
    column: str | None = None,
    split: str = "train",
    config: str | None = None,
    tokenizer: str | None = None,
    rows: int = 10_000,
    seed: int = 0,
    progress: Progress | None = None,
) -> Lengths:
    """Tokens of the rows of ``dataset``, or of so many of them, drawn by ``seed``.

    Args:
        dataset: a JSON file with a list of lengths, or with the batches that `hf-dcp plan` takes; any data set that
            `hf_dcp.data.sources.open_dataset` opens; or lengths with commas between.
        column: with texts, chats, lists of token ids, or numbers of tokens. None: the first of ``length``,
            ``input_ids``, ``text`` and ``messages`` that is there.
        tokenizer: name or folder; None: tokens are estimated from characters.

    Raises:
        ValueError: if there are no such data, or they are something else.
    """
    if rows < 1:
        raise ValueError(f"--rows must be an integer of at least 1, not {rows}")
    listed = _listed(dataset)
    if listed is not None:
        return _drawn(listed, rows, seed, "lengths as listed")
    from hf_dcp.data.sources import open_dataset

    try:
        data = open_dataset(dataset, split, config)
    except (OSError, RuntimeError) as error:  # what hub and file readers raise, where they raise no ValueError
        first = str(error).partition("\n")[0]
        raise ValueError(
            f"{dataset!r} can't be opened ({first}): give a file, a folder or a name on the hub"
        ) from error
    column = _column(data.column_names, column)
    if not len(data):
        raise ValueError(f"{dataset!r} has no rows: give another data set or --split")
    if len(data) > rows:
        data = data.select(np.sort(np.random.default_rng(seed).permutation(len(data))[:rows]))
    kind, first = _kind(data[0][column], column)
    if kind == "number":
        return _checked(np.asarray(data[column]), f"column {column!r}")
    if kind == "tokens":
        return _checked(_sizes(data, column, progress), f"tokens of column {column!r}")
    return _of_texts(data, column, first, tokenizer, progress)


def _listed(text: str) -> np.ndarray | None:
    """The lengths that an argument, or the JSON file that it names, lists; None if it is something else."""
    if text and not text.strip("0123456789, "):
        parts = [part for part in text.replace(" ", "").split(",") if part]
        return _checked(np.array([int(part) for part in parts], np.int64), "list").tokens if parts else None
    path = Path(text)
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError:
        return None  # JSON Lines, perhaps
    found = _numbers(content)
    return None if found is None else _checked(np.array(found, np.int64), str(path)).tokens


def _numbers(content: Any) -> list[int] | None:
    """Lengths in a list, in lists of lists, or under ``batches``, ``lengths`` or ``sequences``."""
    if isinstance(content, dict):
        for key in ("lengths", "batches", "sequences"):
            if key in content:
                return _numbers(content[key])
        content = list(content.values())
    if not isinstance(content, list) or not content:
        return None
    if all(isinstance(x, int) and not isinstance(x, bool) for x in content):
        return content
    if all(isinstance(x, dict) and set(x) <= {"length", "mask"} and "length" in x for x in content):
        return _numbers([x["length"] for x in content])
    parts = [_numbers(x) if isinstance(x, list) else None for x in content]
    return None if None in parts else [n for part in parts for n in part or ()]


def _column(names: Sequence[str], wanted: str | None) -> str:
    if wanted is None:
        for name in ("length", "input_ids", "text", "messages"):
            if name in names:
                return name
        raise ValueError(f"name the column with --column: the data set has {', '.join(names)}")
    if wanted not in names:
        raise ValueError(f"the data set has no column {wanted!r}: use --column with one of {', '.join(names)}")
    return wanted


def _kind(value: Any, column: str) -> tuple[str, Any]:
    """What a column holds: "number", "tokens", "text" or "chat", and the value itself."""
    if isinstance(value, int) and not isinstance(value, bool):
        return "number", value
    if isinstance(value, list) and all(isinstance(x, int) for x in value):
        return "tokens", value
    from hf_dcp.data.sources import is_chat

    return ("chat" if is_chat(value, column) else "text"), value


def _drawn(lengths: np.ndarray, rows: int, seed: int, source: str) -> Lengths:
    if len(lengths) > rows:
        lengths = lengths[np.random.default_rng(seed).permutation(len(lengths))[:rows]]
    return Lengths(lengths, source)


def _checked(tokens: np.ndarray, source: str) -> Lengths:
    tokens = np.asarray(tokens, np.int64)
    if (tokens < 0).any():
        raise ValueError(f"{source} has a negative length: lengths are tokens of a row")
    if not (tokens > 0).any():
        raise ValueError(f"{source}: no row has a token")
    return Lengths(tokens[tokens > 0], source)


def _chunks(data: Any, column: str) -> Iterator[tuple[int, list[Any]]]:
    for begin in range(0, len(data), CHUNK):
        values = data[begin : begin + CHUNK][column]
        yield begin + len(values), values


def _sizes(data: Any, column: str, progress: Progress | None) -> np.ndarray:
    sizes: list[int] = []
    for done, values in _chunks(data, column):
        sizes += [len(value or ()) for value in values]
        if progress:
            progress("reading rows", done, len(data))
    return np.array(sizes, np.int64)


def _of_texts(data: Any, column: str, first: Any, name: str | None, progress: Progress | None) -> Lengths:
    """Tokens of texts or chats: counted for up to `COUNTED` rows, spread evenly, and by characters for the rest."""
    from hf_dcp.data.sources import is_chat

    chat = is_chat(first, column)
    text_of = (lambda row: "".join(str(m["content"]) for m in row or ())) if chat else (lambda row: row or "")
    characters: list[int] = []
    for done, values in _chunks(data, column):
        characters += [len(text_of(value)) for value in values]
        if progress:
            progress("reading rows", done, len(data))
    size = np.array(characters, np.int64)
    if name is None:
        tokens = np.ceil(size / CHARACTERS_PER_TOKEN)
        return _checked(tokens, f"column {column!r} at {CHARACTERS_PER_TOKEN:g} characters per token (no tokenizer)")
    picked = np.unique(np.linspace(0, len(data) - 1, min(COUNTED, len(data))).round().astype(np.int64))
    counted = _count(data.select(picked), column, chat, name, progress)
    if len(picked) == len(data):
        return _checked(counted, f"column {column!r}, counted with the tokenizer {name}")
    ratio = max(int(counted.sum()), 1) / max(int(size[picked].sum()), 1)
    tokens = np.ceil(size * ratio).astype(np.int64)
    tokens[picked] = counted
    return _checked(
        tokens,
        f"column {column!r}: {len(picked):,} rows counted with the tokenizer {name}, the others by their characters "
        f"at the counted rows' {1 / ratio:.2f} per token",
    )


def _count(data: Any, column: str, chat: bool, name: str, progress: Progress | None) -> np.ndarray:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise ValueError(f"--tokenizer {name} can't be read ({first}): name one on the hub, or a folder") from error
    if chat and not tokenizer.chat_template:
        raise ValueError(f"column {column!r} holds chats, but the tokenizer {name} has no chat template: name another")
    sizes: list[int] = []
    for done, values in _chunks(data, column):
        if chat:
            sizes += [len(tokenizer.apply_chat_template(v, tokenize=True, return_dict=False)) for v in values]
        else:
            sizes += [len(ids) for ids in tokenizer([v or "" for v in values], verbose=False)["input_ids"]]
        if progress:
            progress("counting tokens", done, len(data))
    return np.array(sizes, np.int64)
