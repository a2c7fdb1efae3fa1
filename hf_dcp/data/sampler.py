"""Which rows make which batch, and in which order batches come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Sampler

OPEN_BATCHES = 32


class TokenBatches(Sampler[list[int]]):
    """Batches of rows, filled to a budget of tokens.

    The composition of batches depends on the lengths and the seed; their order on the seed and the epoch. So their
    number is the same in every epoch, and a position in an epoch says all that a resumed run must know.

    As a batch sampler it yields the row numbers of each batch. The epoch lies in shared memory: persistent workers see
    it.

    Args:
        lengths: tokens of each row.
        tokens_per_batch: no batch has more tokens.
        seed: of composition and order.
        multiple_of: the number of batches is a multiple of it, so that so many groups make equally many steps. Batches
            of several rows are split for it, the largest first; if that isn't enough, the smallest come again, as
            `fillers`.
        overlong: what to do with a row of more than ``tokens_per_batch`` tokens: ``"error"``, or ``"alone"``: it is a
            batch of its own, beyond the budget.
        shuffle: False: batches are filled and come in the order of rows, whatever the seed and the epoch.

    Raises:
        ValueError: for no row, a row without tokens, an overlong row, or arguments out of range.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        tokens_per_batch: int,
        seed: int = 0,
        multiple_of: int = 1,
        overlong: str = "error",
        shuffle: bool = True,
    ) -> None:
        self.lengths = _checked_lengths(lengths, tokens_per_batch, overlong)
        if multiple_of < 1 or seed < 0:
            raise ValueError(f"multiple_of must be at least 1 and seed at least 0, not {multiple_of} and {seed}")
        self.tokens_per_batch = tokens_per_batch
        self.seed = seed
        self.shuffle = shuffle
        rows = (
            np.random.default_rng([seed, 0]).permutation(len(self.lengths)) if shuffle else np.arange(len(self.lengths))
        )
        batches = _split(_fill(self.lengths, rows, tokens_per_batch), self.lengths, multiple_of)
        missing = -len(batches) % multiple_of
        self.fillers = range(len(batches), len(batches) + missing)
        """Numbers of the batches that are there to even the count: their labels must not count."""
        smallest = sorted(batches, key=lambda rows: (self.tokens(rows), rows[0]))
        self.batches = batches + [smallest[i % len(smallest)] for i in range(missing)]
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def tokens(self, rows: Sequence[int] | np.ndarray) -> int:
        """Tokens of a batch of these rows."""
        return int(self.lengths[rows].sum())

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Make the order that of this epoch, in all processes that share this object."""
        self._epoch.fill_(epoch)

    def order(self) -> np.ndarray:
        """Numbers of the batches in the order of the current epoch."""
        if not self.shuffle:
            return np.arange(len(self.batches))
        return np.random.default_rng([self.seed, 1, self.epoch]).permutation(len(self.batches))

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        for number in self.order():
            yield self.batches[number].tolist()


def _checked_lengths(lengths: Sequence[int] | np.ndarray, budget: int, overlong: str) -> np.ndarray:
    if isinstance(budget, bool) or not isinstance(budget, (int, np.integer)) or budget < 1:
        raise ValueError(f"tokens_per_batch must be an integer of at least 1, not {budget!r}")
    if overlong not in ("error", "alone"):
        raise ValueError(f"overlong must be 'error' or 'alone', not {overlong!r}")
    values = np.asarray(lengths, np.int64)
    if values.ndim != 1 or not len(values):
        raise ValueError("the data set has no rows")
    if values.min() < 1:
        raise ValueError(f"row {int(values.argmin())} of the data set has no tokens: leave empty rows out")
    above = int((values > budget).sum())
    if above and overlong == "error":
        raise ValueError(
            f"{above} of {len(values)} rows have more than tokens_per_batch={budget} tokens, the longest "
            f"{int(values.max())}: cut them, raise tokens_per_batch, or say overlong='alone' to give each a batch "
            f"of its own"
        )
    return values


def _fill(lengths: np.ndarray, rows: np.ndarray, budget: int) -> list[np.ndarray]:
    """First fit, among the last few batches, in the order of ``rows``."""
    done: list[list[int]] = []
    open_batches: deque[tuple[list[int], list[int]]] = deque()  # (rows, [tokens left])
    for row in rows.tolist():
        length = int(lengths[row])
        for batch, left in open_batches:
            if length <= left[0]:
                batch.append(row)
                left[0] -= length
                break
        else:
            batch = [row]
            done.append(batch)
            if length < budget:
                open_batches.append((batch, [budget - length]))
            if len(open_batches) > OPEN_BATCHES:
                open_batches.popleft()
    return [np.array(batch, np.int64) for batch in done]


def _split(batches: list[np.ndarray], lengths: np.ndarray, multiple_of: int) -> list[np.ndarray]:
    """Halve the batches of the most tokens until their number is a multiple, or none of several rows is left."""
    batches = list(batches)
    while len(batches) % multiple_of:
        splittable = [i for i, batch in enumerate(batches) if len(batch) > 1]
        if not splittable:
            break
        largest = max(splittable, key=lambda i: (int(lengths[batches[i]].sum()), -i))
        batch = batches[largest]
        half = np.searchsorted(np.cumsum(lengths[batch]), lengths[batch].sum() / 2) + 1
        cut = int(min(half, len(batch) - 1))
        batches[largest : largest + 1] = [batch[:cut], batch[cut:]]
    return batches
