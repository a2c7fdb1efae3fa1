"""What a process has put into the plan store for the other ranks, and when it takes it out again."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from multiprocessing.util import Finalize

from torch.utils.data import get_worker_info

from hf_dcp.lookahead.link import StoreLink
from hf_dcp.lookahead.store import StoreError

MOST_DUE = 1000


class Shelf:
    """The plans of this process in the store: each stays there for some batches, and all go when the process ends.

    Plans that the store did not take are put there when it takes others again, as somebody may still wait for them.

    Args:
        link: to the store.
        ranks: those that plans are for.
        keep: iterations for which a plan stays in the store.
    """

    def __init__(self, link: StoreLink, ranks: Sequence[int], keep: int) -> None:
        self._link = link
        self._ranks = ranks
        self._keep = _share_of_worker(keep)
        self._calls = 0
        self._put: OrderedDict[bytes, int] = OrderedDict()  # key of a batch -> number of the call
        self._late: dict[str, bytes] = {}
        self._end = Finalize(self, _forget_all, (link, self._put, ranks), exitpriority=-10)

    def __contains__(self, key: bytes) -> bool:
        return key in self._put

    def next_batch(self) -> None:
        """Another batch is asked for."""
        self._calls += 1

    def put(self, key: bytes, plans: dict[int, bytes]) -> int:
        """Leave the encoded plans of a batch, by rank, in one exchange with what is due to leave. Returns their bytes.

        Raises:
            StoreError: if the store doesn't take them; they are kept until it does.
        """
        values = {name_of(key, rank): data for rank, data in plans.items()}
        due = self._due()
        self._put[key] = self._calls  # whatever happens: some of it may have arrived
        try:
            self._exchange(values, due)
        except StoreError:
            self._late |= values
            raise
        return sum(map(len, values.values()))

    def tidy(self) -> int:
        """Put what is late, once the store works again, and take out what is due: another turn of this rank to plan may
        be far. Returns the bytes put. Raises StoreError."""
        due, late = self._due(), {}
        if self._late and not self._link.trouble:
            late, self._late = self._late, {}  # tried once: what the store still refuses is made by who wants it
        if due or late:
            self._exchange(late, due)
        return sum(map(len, late.values()))

    def clear(self) -> None:
        """Take all out."""
        self._end()

    def _due(self) -> list[bytes]:
        """Batches that are to leave the store. While it fails they stay due, the latest `MOST_DUE` of them; what is left
        of others expires."""
        due = [key for key, call in self._put.items() if call <= self._calls - self._keep]
        for key in due[:-MOST_DUE]:
            del self._put[key]
        for name in self._names(due):
            self._late.pop(name, None)
        return due[-MOST_DUE:]

    def _names(self, keys: Iterable[bytes]) -> list[str]:
        return [name_of(key, rank) for key in keys for rank in self._ranks]

    def _exchange(self, values: dict[str, bytes], due: list[bytes]) -> None:
        """Put values and take out what is due. Raises StoreError."""
        names = self._names(due)
        self._link.use(lambda store: store.replace(values, names))
        for key in due:
            del self._put[key]


def name_of(key: bytes, rank: int) -> str:
    """Of a rank's plan in the store. All ranks take a batch in the worker of the same number; no worker deletes, as its
    own, what another one has put there for a batch of the same lengths."""
    worker = get_worker_info()
    return f"{key.hex()}/{0 if worker is None else worker.id}/{rank}"


def _share_of_worker(iterations: int) -> int:
    """So many of the given iterations come to each DataLoader worker, this one for example."""
    worker = get_worker_info()
    return iterations if worker is None else -(-iterations // worker.num_workers)


def _forget_all(link: StoreLink, put: dict[bytes, int], ranks: Sequence[int]) -> None:
    if put:
        names = [name_of(key, rank) for key in put for rank in ranks]
        put.clear()
        with contextlib.suppress(StoreError):
            link.use(lambda store: store.delete(*names))
