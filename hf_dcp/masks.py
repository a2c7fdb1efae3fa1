"""Masks: which KV tokens every query token of a sequence attends to.

A mask gives **ranges**, int32[L, R, 2]: token i attends to the union of the half-open KV ranges ``ranges[i]``, in the
coordinates of its own sequence. Ranges may overlap, may be empty, and there may be any number of them per token.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

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


class Mask(ABC):
    """A mask specification: immutable, hashable, and a function of the sequence's length alone."""

    @abstractmethod
    def ranges(self, length: int) -> np.ndarray:
        """KV ranges of every token of a sequence: int32[length, R, 2].

        Raises:
            ValueError: if the mask was made for a sequence of another length.
        """

    def positions(self, length: int) -> np.ndarray:
        """Position ids: int64[length]."""
        return np.arange(length, dtype=np.int64)

    def segment_starts(self, length: int) -> np.ndarray:
        """Tokens (not 0) that the token before them must not be trained to predict: int64[...], ascending."""
        return np.zeros(0, np.int64)

    def key(self, length: int) -> str:
        """Text that is equal for equal masks and only for them."""
        return repr(self)


@dataclass(frozen=True)
class _Causal(Mask):
    def ranges(self, length: int) -> np.ndarray:
        return _stack(length, (0, _tokens(length) + 1))


@dataclass(frozen=True)
class _Full(Mask):
    def ranges(self, length: int) -> np.ndarray:
        return _stack(length, (0, length))


@dataclass(frozen=True)
class _Lambda(Mask):
    sink: int
    window: int

    def ranges(self, length: int) -> np.ndarray:
        i = _tokens(length)
        recent = (np.maximum(i - self.window + 1, 0), i + 1)
        return _stack(length, (0, np.minimum(self.sink, i + 1)), recent) if self.sink else _stack(length, recent)


@dataclass(frozen=True)
class _Blockwise(Mask):
    block: int
    window_blocks: int
    sink_blocks: int
    test_blocks: int

    def ranges(self, length: int) -> np.ndarray:
        i = _tokens(length)
        b = i // self.block
        first = np.maximum(b - self.window_blocks + 1, 0) * self.block
        test = b >= -(-length // self.block) - self.test_blocks
        sink = np.minimum(self.sink_blocks * self.block, i + 1)
        return _stack(length, (0, np.where(test, i + 1, sink)), (first, i + 1))


@dataclass(frozen=True)
class _SharedQuestion(Mask):
    question: int
    answers: tuple[int, ...]

    def ranges(self, length: int) -> np.ndarray:
        self._check(length)
        i = _tokens(length)
        return _stack(length, (0, np.minimum(i + 1, self.question)), (self._start_of_answer(), i + 1))

    def positions(self, length: int) -> np.ndarray:
        self._check(length)
        i = _tokens(length)
        return np.where(i < self.question, i, i - self._start_of_answer() + self.question)

    def segment_starts(self, length: int) -> np.ndarray:
        self._check(length)
        starts = np.cumsum((self.question, *self.answers))[:-1]
        starts = starts[np.array(self.answers, np.int64) > 0]
        return starts[1:] if self.question else starts[starts > 0]  # the question predicts the first answer only

    def _start_of_answer(self) -> np.ndarray:
        """The first token of each token's answer; of question tokens, one past the token: an empty range."""
        starts = np.cumsum((self.question, *self.answers))[:-1]
        question = np.arange(1, self.question + 1, dtype=np.int64)
        return np.concatenate([question, np.repeat(starts, self.answers)]).astype(np.int64)

    def _check(self, length: int) -> None:
        total = self.question + sum(self.answers)
        if total != length:
            raise ValueError(
                f"shared_question is for {total} tokens (question {self.question} + answers {list(self.answers)}), but "
                f"the sequence has {length}: make the lengths add up to the sequence's"
            )


@dataclass(frozen=True)
class _SharedFraction(Mask):
    """Answers that are each a fixed share of the sequence; the question takes the rest."""

    share: float
    count: int

    def _explicit(self, length: int) -> _SharedQuestion:
        answer = int(self.share * length)
        return _SharedQuestion(length - self.count * answer, (answer,) * self.count)

    def ranges(self, length: int) -> np.ndarray:
        return self._explicit(length).ranges(length)

    def positions(self, length: int) -> np.ndarray:
        return self._explicit(length).positions(length)

    def segment_starts(self, length: int) -> np.ndarray:
        return self._explicit(length).segment_starts(length)


@dataclass(frozen=True)
class _Documents(Mask):
    lengths: tuple[int, ...]
    inner: Mask

    def ranges(self, length: int) -> np.ndarray:
        self._check(length)
        parts = []
        for start, n in zip(self._starts(), self.lengths, strict=True):
            inner = self.inner.ranges(n).copy()
            inner[inner[:, :, 0] < inner[:, :, 1]] += np.int32(start)
            parts.append(inner)
        ranges = np.zeros((length, max(part.shape[1] for part in parts), 2), np.int32)
        for start, part in zip(self._starts(), parts, strict=True):
            ranges[start : start + len(part), : part.shape[1]] = part
        return ranges

    def positions(self, length: int) -> np.ndarray:
        self._check(length)
        return np.concatenate([self.inner.positions(n) for n in self.lengths])

    def segment_starts(self, length: int) -> np.ndarray:
        self._check(length)
        starts = zip(self._starts(), self.lengths, strict=True)
        inner = [np.append(start, start + self.inner.segment_starts(n)) for start, n in starts]
        return np.concatenate(inner)[1:].astype(np.int64)

    def key(self, length: int) -> str:
        return f"documents({self.lengths}, {self.inner.key(length)})"

    def _starts(self) -> np.ndarray:
        return np.cumsum(self.lengths) - self.lengths

    def _check(self, length: int) -> None:
        if sum(self.lengths) != length:
            raise ValueError(
                f"documents is for {sum(self.lengths)} tokens (lengths {list(self.lengths)}), but the sequence has "
                f"{length}: make the lengths add up to the sequence's"
            )


@dataclass(frozen=True, eq=False)
class _Ranges(Mask):
    array: np.ndarray = field(repr=False)
    digest: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Ranges) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def ranges(self, length: int) -> np.ndarray:
        if len(self.array) != length:
            raise ValueError(f"ranges are for {len(self.array)} tokens, but the sequence has {length}: give one row each")
        return self.array


def causal() -> Mask:
    """Token i attends to [0, i + 1)."""
    return _Causal()


def full() -> Mask:
    """Every token attends to the whole sequence."""
    return _Full()


def sliding_window(window: int) -> Mask:
    """Token i attends to its last ``window`` tokens, itself included. Raises ValueError for a window below 1."""
    return _Lambda(0, _count("window", window, 1))


def lambda_mask(sink: int, window: int) -> Mask:
    """Token i attends to the first ``sink`` tokens and to its last ``window`` ones (LM-Infinite, StreamingLLM).

    Raises:
        ValueError: for a negative sink or a window below 1.
    """
    return _Lambda(_count("sink", sink, 0), _count("window", window, 1))


def causal_blockwise(block: int, window_blocks: int, sink_blocks: int, test_blocks: int) -> Mask:
    """Blocks of an in-context-learning prompt: token i of block b attends, up to itself, to the first ``sink_blocks``
    blocks and to the blocks b - window_blocks + 1 ... b; the last ``test_blocks`` blocks attend to all before them.

    Raises:
        ValueError: for block or window_blocks below 1, or negative sink_blocks or test_blocks.
    """
    return _Blockwise(
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
    if not answers:
        raise ValueError("answers is empty: give the length of each answer, or use causal()")
    return _SharedQuestion(_count("question", question, 0), tuple(_count("answers", a, 0) for a in answers))


def documents(lengths: Sequence[int], inner: Mask | None = None) -> Mask:
    """Documents packed in one sequence: the inner mask (default causal) inside each, nothing across.

    Raises:
        ValueError: for no document, or one without a token.
    """
    if not lengths:
        raise ValueError("lengths is empty: documents needs the length of each document")
    return _Documents(tuple(_count("lengths", n, 1) for n in lengths), inner or causal())


def from_ranges(ranges: np.ndarray) -> Mask:
    """A mask given as explicit ranges.

    Args:
        ranges: integers [L, R, 2], half-open KV ranges of each token, 0 <= lo <= hi <= L; any R, overlaps are unions.

    Raises:
        ValueError: for another shape or type, or a range out of order or beyond the sequence.
    """
    given = np.asarray(ranges)
    if given.ndim != 3 or given.shape[2] != 2 or not np.issubdtype(given.dtype, np.integer):
        raise ValueError(f"ranges must be integers of shape [tokens, ranges, 2], not {given.dtype}{list(given.shape)}")
    bad = (given[..., 0] < 0) | (given[..., 0] > given[..., 1]) | (given[..., 1] > len(given))
    if bad.any():
        token, column = np.argwhere(bad)[0]
        lo, hi = given[token, column].tolist()
        raise ValueError(f"ranges[{token}, {column}] is ({lo}, {hi}): must be 0 <= lo <= hi <= {len(given)} (the tokens)")
    array = np.ascontiguousarray(given, np.int32)
    array.setflags(write=False)
    state = hashlib.blake2b(array.tobytes(), digest_size=16)
    return _Ranges(array, f"{array.shape[0]}x{array.shape[1]}:{state.hexdigest()}")


def _tokens(length: int) -> np.ndarray:
    return np.arange(length, dtype=np.int64)


def _stack(length: int, *columns: tuple[object, object]) -> np.ndarray:
    ranges = np.empty((length, len(columns), 2), np.int32)
    for c, (lo, hi) in enumerate(columns):
        ranges[:, c, 0], ranges[:, c, 1] = lo, hi
    return ranges


def _count(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
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
        share, count = float(share_text), int(count_text)
    except ValueError:
        raise ValueError("the share must be a number and the count an integer") from None
    if not (share > 0 and count >= 1 and share * count <= 1):
        raise ValueError(f"{count} answers of {share:g} of the sequence don't fit into it")
    return _SharedFraction(share, count)


def _integers(text: str, least: int, most: int | None) -> list[int]:
    parts = text.split(",") if text else []
    if len(parts) < least or (most is not None and len(parts) > most):
        wanted = f"{least}" if most == least else f"at least {least}"
        raise ValueError(f"takes {wanted} parameters, not {len(parts)}")
    try:
        return [int(part) for part in parts]
    except ValueError:
        raise ValueError("parameters must be integers") from None
