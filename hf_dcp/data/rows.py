"""From rows of a data set to one batch of the whole group: tokens, labels, positions, masks. Nothing is cut here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_dcp.masks import Mask, documents, from_ranges, parse_mask, shared_question
from hf_dcp.planning.batch import BatchSpec

Row = dict[str, Any]
MaskLike = str | Mask | Callable[[Row], Any]
"""A mask, its text, a name in ``BY_COLUMNS``, or a function from a row to a mask, a text, or ranges int[L, R, 2]."""

IGNORE = -100

BY_COLUMNS: dict[str, tuple[tuple[str, ...], Callable[..., Mask]]] = {
    "shared_question": (("question_length", "answer_lengths"), shared_question),
    "documents": (("document_lengths",), documents),
}
"""Masks whose lengths stand in columns of the row."""


@dataclass(frozen=True)
class GroupBatch:
    """A batch of the whole group, sequences one after the other; all arrays int64[tokens].

    Position ids may have several rows: int64[rows, tokens], for models whose positions have parts (M-RoPE).
    """

    spec: BatchSpec
    input_ids: np.ndarray
    position_ids: np.ndarray
    shift_labels: np.ndarray
    """The label that each token is to predict: that of the next one of its segment, or -100."""

    @property
    def num_items(self) -> int:
        """Tokens that count in the loss."""
        return int((self.shift_labels != IGNORE).sum())


class RowReader:
    """Makes batches of rows.

    Args:
        mask: of every row; see `MaskLike`.

    Raises:
        ValueError: for an unknown mask, or wrong parameters of one.
    """

    def __init__(self, mask: MaskLike) -> None:
        self.mask: MaskLike = parse_mask(mask) if isinstance(mask, str) and mask not in BY_COLUMNS else mask
        if not (isinstance(mask, (str, Mask)) or callable(mask)):
            raise ValueError(f"mask must be a text such as 'causal', a mask, or a function of a row, not {mask!r}")

    def read(self, rows: Sequence[Row]) -> GroupBatch:
        """One batch of ``rows``, each with ``input_ids``, perhaps ``labels`` and ``position_ids`` ([L], or [rows, L]), and
        the columns that the mask needs.

        Raises:
            ValueError: for no rows, a row without tokens, labels that don't fit, padding, or a mask that doesn't fit;
            the
                text names the row.
        """
        if not rows:
            raise ValueError("the batch has no sequence: leave empty batches out")
        ids = [_tokens(i, row) for i, row in enumerate(rows)]
        masks = [self._mask(i, row) for i, row in enumerate(rows)]
        positions, labels = [], []
        for i, (row, tokens, mask) in enumerate(zip(rows, ids, masks)):
            try:
                positions.append(_positions(i, row, tokens, mask))
                starts = mask.segment_starts(len(tokens))
            except ValueError as error:
                raise ValueError(f"row {i} of the batch: {error}") from error
            labels.append(shift(_labels(i, row, tokens), starts))
        spec = BatchSpec([len(tokens) for tokens in ids], masks)
        if len({len(p) if p.ndim > 1 else 0 for p in positions}) > 1:
            raise ValueError("some rows of the batch have position_ids of other parts than others: give all the same")
        return GroupBatch(spec, np.concatenate(ids), np.concatenate(positions, -1), np.concatenate(labels))

    def _mask(self, i: int, row: Row) -> Mask:
        mask = self.mask
        if isinstance(mask, Mask):
            return mask
        try:
            return _of_columns(mask, row) if isinstance(mask, str) else _as_mask(mask(row))
        except ValueError as error:
            raise ValueError(f"row {i} of the batch: {error}") from error


def shift(labels: np.ndarray, segment_starts: np.ndarray) -> np.ndarray:
    """The labels of a sequence one to the left; the last token of each segment predicts nothing: int64[L]."""
    shifted = np.append(labels[1:], IGNORE)
    shifted[segment_starts - 1] = IGNORE
    return shifted


def _tokens(i: int, row: Row) -> np.ndarray:
    if "input_ids" not in row:
        raise ValueError(f"row {i} of the batch has no input_ids: tokenise the data set first")
    tokens = np.asarray(row["input_ids"], np.int64)
    if tokens.ndim != 1 or not len(tokens):
        raise ValueError(
            f"row {i} of the batch has input_ids of shape {list(tokens.shape)}: it needs at least one token"
        )
    if "attention_mask" in row and not np.all(np.asarray(row["attention_mask"]) == 1):
        raise ValueError(f"row {i} of the batch is padded (attention_mask has a 0): leave padding out")
    return tokens


def _labels(i: int, row: Row, tokens: np.ndarray) -> np.ndarray:
    labels = np.asarray(row.get("labels", tokens), np.int64)
    if labels.shape != tokens.shape:
        raise ValueError(
            f"row {i} of the batch has {len(tokens)} input_ids but {labels.size} labels: give one per token"
        )
    return labels


def _positions(i: int, row: Row, tokens: np.ndarray, mask: Mask) -> np.ndarray:
    """Those of the row, else those of its mask: int64[L] or int64[rows, L]."""
    if row.get("position_ids") is None:
        return mask.positions(len(tokens))
    positions = np.asarray(row["position_ids"], np.int64)
    if positions.ndim not in (1, 2) or positions.shape[-1] != len(tokens):
        raise ValueError(
            f"row {i} of the batch has {len(tokens)} input_ids but position_ids of shape {list(positions.shape)}: give "
            "one per token, or rows of one per token"
        )
    return positions


def _of_columns(name: str, row: Row) -> Mask:
    columns, make = BY_COLUMNS[name]
    for column in columns:
        if column not in row:
            raise ValueError(f"mask {name!r} needs the column {column}; the row has {', '.join(row)}")
    return make(*(row[column] for column in columns))


def _as_mask(value: Any) -> Mask:
    """What a user's function returned, as a mask."""
    if isinstance(value, Mask):
        return value
    return parse_mask(value) if isinstance(value, str) else from_ranges(value)
