"""Masks: which KV tokens every query token of a sequence attends to.

A mask gives **ranges**, int32[L, R, 2]: token i attends to the union of the half-open KV ranges ``ranges[i]``, in the
coordinates of its own sequence. Ranges may overlap, may be empty, and there may be any number of them per token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from hf_dcp.mask_kinds import (
    Blockwise,
    Causal,
    Documents,
    Explicit,
    Full,
    Lambda,
    Mask,
    SharedFraction,
    SharedQuestion,
)
from hf_dcp.ranges import intersect_window, normalise, to_slices

__all__ = [
    "Mask",
    "causal",
    "causal_blockwise",
    "documents",
    "from_ranges",
    "full",
    "intersect_window",
    "lambda_mask",
    "normalise",
    "parse_mask",
    "shared_question",
    "sliding_window",
    "to_slices",
]


def causal() -> Mask:
    """Token i attends to [0, i + 1)."""
    return Causal()


def full() -> Mask:
    """Every token attends to the whole sequence."""
    return Full()


def sliding_window(window: int) -> Mask:
    """Token i attends to its last ``window`` tokens, itself included. Raises ValueError for a window below 1."""
    return Lambda(0, _count("window", window, 1))


def lambda_mask(sink: int, window: int) -> Mask:
    """Token i attends to the first ``sink`` tokens and to its last ``window`` ones (LM-Infinite, StreamingLLM).

    Raises:
        ValueError: for a negative sink or a window below 1.
    """
    return Lambda(_count("sink", sink, 0), _count("window", window, 1))


def causal_blockwise(block: int, window_blocks: int, sink_blocks: int, test_blocks: int) -> Mask:
    """Blocks of an in-context-learning prompt: token i of block b attends, up to itself, to the first ``sink_blocks``
    blocks and to the blocks b - window_blocks + 1 ... b; the last ``test_blocks`` blocks attend to all before them.

    Raises:
        ValueError: for block or window_blocks below 1, or negative sink_blocks or test_blocks.
    """
    return Blockwise(
        _count("block", block, 1),
        _count("window_blocks", window_blocks, 1),
        _count("sink_blocks", sink_blocks, 0),
        _count("test_blocks", test_blocks, 0),
    )


def shared_question(question: int, answers: Sequence[int]) -> Mask:
    """A question and its answers in one sequence: each answer sees the question and itself, as if it were alone.

    Args:
        question: tokens of the question; may be 0.
        answers: tokens of each answer; an answer may be empty. Position ids of every answer start at ``question``.

    Raises:
        ValueError: for negative lengths, or no answer.
    """
    if len(answers) == 0:
        raise ValueError("answers is empty: give the length of each answer, or use causal()")
    return SharedQuestion(_count("question", question, 0), tuple(_count("answers", a, 0) for a in answers))


def documents(lengths: Sequence[int], inner: Mask | None = None) -> Mask:
    """Documents packed in one sequence: the inner mask (default causal) inside each, nothing across.

    Raises:
        ValueError: for no document, or one without a token.
    """
    if len(lengths) == 0:
        raise ValueError("lengths is empty: documents needs the length of each document")
    return Documents(tuple(_count("lengths", n, 1) for n in lengths), inner or causal())


def from_ranges(ranges: np.ndarray) -> Mask:
    """A mask given as explicit ranges.

    Args:
        ranges: integers [L, R, 2], half-open KV ranges of each token, 0 <= lo <= hi <= L; any R, overlaps are unions.

    Raises:
        ValueError: for another shape or type, or a range out of order or beyond the sequence.
    """
    try:
        given = np.asarray(ranges)
    except ValueError:
        raise ValueError(
            "ranges must be one array [tokens, ranges, 2]: pad tokens with fewer ranges by (0, 0)"
        ) from None
    if given.ndim != 3 or given.shape[2] != 2 or not np.issubdtype(given.dtype, np.integer):
        raise ValueError(f"ranges must be integers of shape [tokens, ranges, 2], not {given.dtype}{list(given.shape)}")
    bad = (given[..., 0] < 0) | (given[..., 0] > given[..., 1]) | (given[..., 1] > len(given))
    if bad.any():
        token, column = np.argwhere(bad)[0]
        lo, hi = given[token, column].tolist()
        raise ValueError(
            f"ranges[{token}, {column}] is ({lo}, {hi}): must be 0 <= lo <= hi <= {len(given)} (the tokens)"
        )
    array = np.array(given, np.int32, order="C")  # a copy: later changes of the argument must not reach the mask
    array.setflags(write=False)
    state = hashlib.blake2b(array.tobytes(), digest_size=16)
    return Explicit(array, f"{array.shape[0]}x{array.shape[1]}:{state.hexdigest()}")


def _count(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not least <= value < 2**31:
        raise ValueError(f"{name} must be an integer of at least {least} (and below 2**31), not {value!r}")
    return int(value)


_FORMS = {
    "causal": "causal",
    "full": "full",
    "window": "window:4096",
    "lambda": "lambda:64,4096",
    "blockwise": "blockwise:256,2,1,1",
    "shared": "shared:0.2x4 or shared:1000,200,300",
    "documents": "documents:1000,2000 or documents:1000,2000/full",
}


def parse_mask(text: str) -> Mask:
    """The mask of a text such as ``lambda:64,4096`` (see ``_FORMS``; the text follows the colon).

    Raises:
        ValueError: for an unknown name or wrong parameters, with a text that would be right.
    """
    name, _, rest = text.partition(":")
    if name not in _FORMS:
        raise ValueError(f"unknown mask {name!r}: write one of {', '.join(_FORMS.values())}")
    try:
        return _parse(name, rest)
    except ValueError as error:
        raise ValueError(f"mask {text!r}: {error} (write {_FORMS[name]})") from error


def _parse(name: str, rest: str) -> Mask:
    if name == "documents":
        lengths, slash, inner = rest.partition("/")
        return documents(_integers(lengths, 1, None), parse_mask(inner) if slash else causal())
    if name == "shared" and "x" in rest:
        return _parse_fraction(rest)
    if name == "shared":
        question, *answers = _integers(rest, 2, None)
        return shared_question(question, answers)
    if name == "window":
        return sliding_window(*_integers(rest, 1, 1))
    if name == "lambda":
        return lambda_mask(*_integers(rest, 2, 2))
    if name == "blockwise":
        return causal_blockwise(*_integers(rest, 4, 4))
    _integers(rest, 0, 0)
    return causal() if name == "causal" else full()


def _parse_fraction(rest: str) -> Mask:
    share_text, _, count_text = rest.partition("x")
    try:
        share, count = Fraction(share_text), int(count_text)  # exact: 0.29 of 100 tokens are 29
    except (ValueError, ZeroDivisionError):
        raise ValueError("the share must be a number and the count an integer") from None
    if not (share > 0 and count >= 1 and share * count <= 1):
        raise ValueError(f"{count_text} answers of {share_text} of the sequence don't fit into it")
    return SharedFraction(share, count)


def _integers(text: str, least: int, most: int | None) -> list[int]:
    parts = text.split(",") if text else []
    if len(parts) < least or (most is not None and len(parts) > most):
        wanted = f"{least}" if most == least else f"at least {least}"
        raise ValueError(f"takes {wanted} parameters, not {len(parts)}")
    try:
        return [int(part) for part in parts]
    except ValueError:
        raise ValueError("parameters must be integers") from None
