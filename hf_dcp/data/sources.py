"""Opening a data set by what a user names it: a file, a folder, or a name on the hub."""

from __future__ import annotations

from pathlib import Path

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

FILES = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}


def open_dataset(name: str, split: str, config: str | None = None) -> Dataset:
    """A data set by its name on the hub, a folder saved by ``save_to_disk``, or a JSON, JSON Lines, Parquet, CSV or
    text file.

    Raises:
        ValueError: if there is no such split, or a file is of another kind.
    """
    path = Path(name)
    if path.is_file():
        if path.suffix not in FILES:
            raise ValueError(f"dataset {name!r} must end in one of {', '.join(FILES)}, or be a folder or a hub name")
        return load_dataset(FILES[path.suffix], data_files=name, split="train")
    if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
        data = load_from_disk(name)
        if isinstance(data, DatasetDict):
            if split not in data:
                raise ValueError(f"dataset {name!r} has no split {split!r}: use one of {', '.join(data)}")
            data = data[split]
        return data
    return load_dataset(name, config, split=split)


def is_chat(value: object, column: str) -> bool:
    """Whether a column's value is a chat rather than a text. Raises ValueError if it is neither."""
    if isinstance(value, str):
        return False
    if (
        isinstance(value, list)
        and value
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
    ):
        return True
    raise ValueError(
        f"column {column!r} must hold strings, or chats as lists of {{'role', 'content'}}, not {type(value).__name__}"
    )
