"""Questions with ranked answers: as pairs for TRL's trainers, and as rows of tokens for the shared-question mask."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hf_dcp.data.rows import IGNORE, Row


def ranked_pairs(rows: Iterable[Mapping[str, Any]], question: str = "question", answers: str = "answers") -> list[Row]:
    """All pairs of a question's answers, as ``prompt``, ``chosen`` and ``rejected``.

    The pairs of a question stand behind each other: in a batch of whole questions every answer is computed once. Keep
    that order (no shuffling afterwards), and take batches of n (n - 1) / 2 pairs for n answers, or a multiple.

    Args:
        rows: with the question's text, or messages of a chat, and a list of answers, the best one first. With a column
            ``scores``, a number for each answer, those with higher scores are the better ones, and equal ones make no pair.

    Raises:
        ValueError: for a missing column, fewer than two answers, an empty one, or scores that don't match; the text
            names the row.
    """
    made: list[Row] = []
    for number, row in enumerate(rows):
        texts = _answers(number, row, question, answers, least=2)
        scores = row.get("scores")
        if scores is None:
            scores = range(len(texts), 0, -1)
        elif len(scores) != len(texts):
            raise ValueError(
                f"row {number} has {len(texts)} {answers} but {len(scores)} scores: give one for each answer"
            )
        order = sorted(range(len(texts)), key=lambda i: -scores[i])
        for place, better in enumerate(order):
            for worse in order[place + 1 :]:
                if scores[better] > scores[worse]:
                    made.append({"prompt": row[question], "chosen": texts[better], "rejected": texts[worse]})
    return made


def shared_question_row(question: Sequence[int], answers: Sequence[Sequence[int]], number: int = 0) -> Row:
    """One row in which every answer is trained on as if it stood alone behind the question.

    The last token of the question predicts the first of each answer, so it stands before each of them.

    Args:
        question: token ids; may be empty.
        answers: token ids of each.
        number: of the row, for errors.

    Returns:
        ``input_ids``, ``labels`` (-100 but for answers), ``length``, and ``question_length`` and ``answer_lengths``, which
        the mask ``"shared_question"`` reads.

    Raises:
        ValueError: for no answer, or an answer without a token; the text names the row.
    """
    if len(answers) == 0:
        raise ValueError(f"row {number} has no answers: give at least one, or leave the row out")
    for i, answer in enumerate(answers):
        if len(answer) == 0:
            raise ValueError(f"row {number} has no token in answer {i}: leave empty answers out")
    last = list(question[-1:])
    branches = [last + list(answer) for answer in answers]
    start = list(question[:-1])
    labels = [IGNORE] * len(start)
    for branch in branches:
        labels += [IGNORE] * len(last) + branch[len(last) :]
    ids = start + [token for branch in branches for token in branch]
    return {
        "input_ids": ids,
        "labels": labels,
        "length": len(ids),
        "question_length": len(start),
        "answer_lengths": [len(branch) for branch in branches],
    }


def shared_question_rows(
    rows: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    max_length: int,
    question: str = "question",
    answers: str = "answers",
) -> Iterator[Row]:
    """`shared_question_row` for texts; the tokenizer's end-of-text token ends each answer, and answers are cut at
    ``max_length``, question included.

    Raises:
        ValueError: as `shared_question_row`, and for a missing column or a question of ``max_length`` tokens or more.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for number, row in enumerate(rows):
        texts = _answers(number, row, question, answers, least=1)
        ids = tokenizer(row[question])["input_ids"]
        check_question(number, len(ids), max_length)
        encoded = [(tokenizer(text, add_special_tokens=False)["input_ids"] + end) for text in texts]
        yield shared_question_row(ids, [answer[: max_length - len(ids)] for answer in encoded], number)


def check_question(number: int, tokens: int, max_length: int) -> None:
    """Raise ValueError if a row's question fills ``max_length``."""
    if tokens >= max_length:
        raise ValueError(
            f"row {number} has a question of {tokens} tokens, which leaves none of max_length={max_length} for answers: "
            "leave it out or raise the maximum"
        )


def _answers(number: int, row: Mapping[str, Any], question: str, answers: str, least: int) -> list[Any]:
    for column in (question, answers):
        if row.get(column) is None:
            raise ValueError(f"row {number} has no {column!r}: its columns are {', '.join(row)}")
    texts = row[answers]
    if isinstance(texts, str) or not isinstance(texts, (list, tuple)):
        raise ValueError(f"row {number} has {answers} of type {type(texts).__name__}: give a list, the best one first")
    if len(texts) < least:
        wanted = "at least one" if least == 1 else "at least two, to compare them"
        raise ValueError(f"row {number} has {len(texts)} {answers}: give {wanted}, or leave the row out")
    for i, text in enumerate(texts):
        if not text:
            raise ValueError(f"row {number} has an empty answer, number {i}: leave empty answers out")
    return list(texts)
