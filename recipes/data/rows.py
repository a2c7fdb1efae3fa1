"""From a data set with a text or a chat column to rows of tokens."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from hf_dcp.data.sources import is_chat, open_dataset

__all__ = ["is_chat", "open_dataset", "tokenise"]


def tokenise(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, column: str, max_length: int) -> Dataset:
    """Rows of ``input_ids``, and their ``length`` in tokens.

    Args:
        dataset: ``column`` holds strings, or chats: lists of ``{"role": ..., "content": ...}``, which go through the
            tokenizer's chat template.
        max_length: longer rows are cut at so many tokens.

    Raises:
        ValueError: if the column is missing or holds something else, the tokenizer has no chat template, or
            no row has a token.
    """
    if column not in dataset.column_names:
        raise ValueError(f"the data set has no column {column!r}: use one of {', '.join(dataset.column_names)}")
    if max_length < 2:
        raise ValueError(f"max_length must be at least 2 tokens, not {max_length}")
    if len(dataset) == 0:
        raise ValueError("the data set has no rows")
    chat = is_chat(dataset[0][column], column)
    if chat and not tokenizer.chat_template:
        raise ValueError(f"column {column!r} holds chats, but the tokenizer has no chat template: set one, or use text")
    rows = dataset.map(
        _encode,
        batched=True,
        remove_columns=dataset.column_names,
        fn_kwargs={"tokenizer": tokenizer, "column": column, "max_length": max_length, "chat": chat},
        desc="tokenise",
    )
    rows = rows.filter(_not_empty, batched=True, desc="drop empty rows")
    if len(rows) == 0:
        raise ValueError(f"no row of column {column!r} has a token")
    return rows


def _encode(
    batch: dict[str, list[Any]], tokenizer: PreTrainedTokenizerBase, column: str, max_length: int, chat: bool
) -> dict[str, list[Any]]:
    if chat:
        encoded = [tokenizer.apply_chat_template(row, tokenize=True, return_dict=False) for row in batch[column]]
    else:
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        texts = [row or "" for row in batch[column]]
        encoded = [ids + end if ids else ids for ids in tokenizer(texts, verbose=False)["input_ids"]]
    ids = [row[:max_length] for row in encoded]
    return {"input_ids": ids, "length": [len(row) for row in ids]}


def _not_empty(batch: dict[str, list[Any]]) -> list[bool]:
    return [length > 0 for length in batch["length"]]
