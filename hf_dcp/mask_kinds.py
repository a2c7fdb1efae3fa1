"""The kinds of masks, as immutable values. The functions of `hf_dcp.masks` make them and check what they get."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np


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
        """Text that is equal for equal masks and only for them, on every machine."""
        return repr(self)


@dataclass(frozen=True)
class Causal(Mask):
    def ranges(self, length: int) -> np.ndarray:
        return _stack(length, (0, _tokens(length) + 1))


@dataclass(frozen=True)
class Full(Mask):
    def ranges(self, length: int) -> np.ndarray:
        return _stack(length, (0, length))


@dataclass(frozen=True)
class Lambda(Mask):
    """The first tokens and the last ones; a sliding window where there is no sink."""

    sink: int
    window: int

    def ranges(self, length: int) -> np.ndarray:
        i = _tokens(length)
        recent = (np.maximum(i - self.window + 1, 0), i + 1)
        return _stack(length, (0, np.minimum(self.sink, i + 1)), recent) if self.sink else _stack(length, recent)


@dataclass(frozen=True)
class Blockwise(Mask):
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
class SharedQuestion(Mask):
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
        return starts[1:]  # the question predicts the first answer; without a question nothing does

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
class SharedFraction(Mask):
    """Answers that are each a fixed share of the sequence, rounded down; the question takes the rest."""

    share: Fraction
    count: int

    def ranges(self, length: int) -> np.ndarray:
        return self._explicit(length).ranges(length)

    def positions(self, length: int) -> np.ndarray:
        return self._explicit(length).positions(length)

    def segment_starts(self, length: int) -> np.ndarray:
        return self._explicit(length).segment_starts(length)

    def _explicit(self, length: int) -> SharedQuestion:
        answer = int(self.share * length)
        return SharedQuestion(length - self.count * answer, (answer,) * self.count)


@dataclass(frozen=True)
class Documents(Mask):
    lengths: tuple[int, ...]
    inner: Mask

    def ranges(self, length: int) -> np.ndarray:
        self._check(length)
        inner = {n: self.inner.ranges(n) for n in set(self.lengths)}
        ranges = np.zeros((length, max(part.shape[1] for part in inner.values()), 2), np.int32)
        for start, n in zip(self._starts(), self.lengths, strict=True):
            part = inner[n]
            ranges[start : start + n, : part.shape[1]] = part + np.int32(start)  # empty ranges stay empty
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
        return f"Documents({self.lengths}, {[self.inner.key(n) for n in sorted(set(self.lengths))]})"

    def _starts(self) -> list[int]:
        return (np.cumsum(self.lengths) - self.lengths).tolist()

    def _check(self, length: int) -> None:
        if sum(self.lengths) != length:
            raise ValueError(
                f"documents is for {sum(self.lengths)} tokens (lengths {list(self.lengths)}), but the sequence has "
                f"{length}: make the lengths add up to the sequence's"
            )


@dataclass(frozen=True, eq=False)
class Explicit(Mask):
    """Ranges given one by one. Masks are equal if the digests of their ranges are."""

    array: np.ndarray = field(repr=False)
    digest: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Explicit) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def ranges(self, length: int) -> np.ndarray:
        if len(self.array) != length:
            raise ValueError(
                f"ranges are for {len(self.array)} tokens, but the sequence has {length}: give one row each"
            )
        return self.array


def _tokens(length: int) -> np.ndarray:
    return np.arange(length, dtype=np.int64)


def _stack(length: int, *columns: tuple[np.ndarray | int, np.ndarray | int]) -> np.ndarray:
    ranges = np.empty((length, len(columns), 2), np.int32)
    for c, (lo, hi) in enumerate(columns):
        ranges[:, c, 0], ranges[:, c, 1] = lo, hi
    return ranges
