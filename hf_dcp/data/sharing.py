"""Sequences with a common beginning, such as a question with its answers, packed so that the beginning is there once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_dcp.data.rows import IGNORE, GroupBatch
from hf_dcp.masks import Mask, shared_question
from hf_dcp.planning.batch import BatchSpec


@dataclass(frozen=True)
class SharedBatch:
    """Some sequences, packed, and where their tokens went."""

    batch: GroupBatch
    places: list[np.ndarray]
    """Of every sequence, where its tokens stand in the batch: int64[its tokens], without the last one if that was left
    out."""
    predicts: list[np.ndarray]
    """Which of them are to predict the next one of their sequence: bool, as ``places``."""


def pack(
    sequences: Sequence[np.ndarray],
    groups: Sequence[Sequence[int]],
    labels: Sequence[np.ndarray] | None = None,
    dummy_token: int = 0,
) -> SharedBatch:
    """Pack every group of sequences into one, under a shared-question mask.

    The tokens with which all sequences of a group begin are the question. Where next tokens are to be predicted, the
    last common token predicts a different one in each sequence, so it stands in each of them; and the last token of a
    sequence, which predicts nothing, is left out. Sequences that begin differently come out as documents. Equal ones
    are there once.

    Args:
        sequences: token ids, int64[L] each, L at least 1.
        groups: numbers of sequences; every sequence is in one group.
        labels: of every sequence, the ids that its tokens are, or -100 where they are not to be predicted: int64[L]
            each. None: nothing is predicted, and all tokens are needed.
        dummy_token: the only token of a batch that would have none.
    """
    tail = 0 if labels is None else 1
    places: list[np.ndarray] = [np.zeros(0, np.int64)] * len(sequences)
    rows: list[np.ndarray] = []
    masks: list[Mask] = []
    end = 0
    for group in groups:
        row, mask, of_group = _pack_group([sequences[k] for k in group], tail)
        for k, place in zip(group, of_group, strict=True):
            places[k] = place + end
        if len(row):
            rows.append(row)
            masks.append(mask)
            end += len(row)
    if not rows:
        rows, masks, end = [np.array([dummy_token], np.int64)], [shared_question(0, [1])], 1
    shift_labels = np.full(end, IGNORE, np.int64)
    predicts = [of_sequence[1:] != IGNORE for of_sequence in labels or ()]
    for of_sequence, place, wanted in zip(labels or (), places, predicts):
        shift_labels[place[wanted]] = of_sequence[1:][wanted]
    lengths = [len(row) for row in rows]
    positions = [mask.positions(length) for mask, length in zip(masks, lengths, strict=True)]
    batch = GroupBatch(BatchSpec(lengths, masks), np.concatenate(rows), np.concatenate(positions), shift_labels)
    return SharedBatch(batch, places, predicts)


def _pack_group(sequences: list[np.ndarray], tail: int) -> tuple[np.ndarray, Mask, list[np.ndarray]]:
    """The tokens of one group, its mask, and of every sequence where its tokens stand in it."""
    question = max(common_prefix(sequences) - tail, 0)
    parts = [sequences[0][:question]]
    branch_of: dict[bytes, int] = {}
    starts: list[int] = []
    lengths: list[int] = []
    places: list[np.ndarray] = []
    end = question
    for sequence in sequences:
        branch = sequence[question : len(sequence) - tail]
        number = branch_of.setdefault(sequence.tobytes(), len(starts))
        if number == len(starts):
            parts.append(branch)
            starts.append(end)
            lengths.append(len(branch))
            end += len(branch)
        places.append(np.concatenate([np.arange(question), starts[number] + np.arange(len(branch))]).astype(np.int64))
    return np.concatenate(parts), shared_question(question, lengths), places


def common_prefix(sequences: Sequence[np.ndarray]) -> int:
    """With how many equal tokens all of the sequences begin."""
    shortest = min(len(sequence) for sequence in sequences)
    first = sequences[0][:shortest]
    differs = np.zeros(shortest, bool)
    for sequence in sequences[1:]:
        differs |= sequence[:shortest] != first
    return int(differs.argmax()) if differs.any() else shortest


def group_pairs(sequences: Sequence[np.ndarray], prompts: Sequence[int] | None) -> list[list[int]]:
    """Which sequences to pack together: sequence k and sequence pairs + k are the two of a pair, and a pair joins an
    earlier one with an equal sequence or an equal prompt, if that makes fewer tokens.

    Args:
        sequences: first those that were chosen, then, in the same order, those that were rejected.
        prompts: tokens of the prompt of each; None: not known.
    """
    pairs = len(sequences) // 2
    groups: list[list[int]] = []
    seen: dict[bytes, int] = {}
    for k in range(pairs):
        pair = [k, pairs + k]
        keys = [sequences[i].tobytes() for i in pair]
        if prompts is not None:
            keys += [b"prompt" + sequences[i][: prompts[i]].tobytes() for i in pair if prompts[i]]
        alone = _tokens_of(sequences, pair)
        best, saved = len(groups), 0
        for group in sorted({seen[key] for key in keys if key in seen}):
            together = _tokens_of(sequences, groups[group] + pair)
            saving = _tokens_of(sequences, groups[group]) + alone - together
            if saving > saved:
                best, saved = group, saving
        if best == len(groups):
            groups.append([])
        groups[best] += pair
        for key in keys:
            seen.setdefault(key, best)
    return groups


def _tokens_of(sequences: Sequence[np.ndarray], group: Sequence[int]) -> int:
    """About how many tokens the sequences of a group have, packed."""
    members = list({sequences[k].tobytes(): sequences[k] for k in group}.values())
    common = common_prefix(members)
    return common + sum(len(sequence) - common for sequence in members)
