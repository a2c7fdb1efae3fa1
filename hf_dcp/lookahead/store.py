"""Plan stores: where the rank that plans a batch leaves the plans of the others.

A store is opened anew in every process: connections don't survive forks. What travels between processes is a
`StoreAddress`.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, Protocol, TypeVar

from hf_dcp.lookahead.redis_settings import RedisSettings

CHUNK_BYTES = 4 << 20
"""Values of torch's TCP store may have at most 8 MiB; longer ones are cut at half of that."""
MOST_CHUNKS = 256
LONGEST_POLL_S = 0.05
REDIS_ANSWER_S = 3.0
"""After so many seconds without an answer a Redis server counts as gone."""


class StoreError(RuntimeError):
    """The store can't be reached, or refuses."""


class StoreTimeout(StoreError):
    """The value didn't come in time."""


T = TypeVar("T")


def poll(look: Callable[[], T], timeout: float) -> T:
    """The first true answer of ``look``, asked again and again with pauses of 2 to 50 ms.

    Raises:
        StoreTimeout: if none comes within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    pause = 0.002
    while True:
        found = look()
        if found:
            return found
        left = deadline - time.monotonic()
        if left <= 0:
            raise StoreTimeout(f"no value after {timeout:g} s")
        time.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_POLL_S)


class PlanStore(Protocol):
    """Bytes by name."""

    def put(self, key: str, data: bytes) -> None:
        """Set a value. Raises StoreError if the store can't be reached."""

    def replace(self, values: Mapping[str, bytes], forget: Iterable[str] = ()) -> None:
        """Set values and forget others, in one exchange where the store can. Raises StoreError."""

    def get(self, key: str, timeout: float) -> bytes:
        """Wait up to ``timeout`` seconds for a value. Raises StoreTimeout or StoreError."""

    def delete(self, *keys: str) -> None:
        """Forget values; missing ones are no error. Raises StoreError if the store can't be reached."""

    def clear(self) -> None:
        """Forget all that this run has left, where the store outlives the run. Raises StoreError."""


@dataclass(frozen=True)
class StoreAddress:
    """How a process gets to the plan store of a run.

    Args:
        kind: "torch", "redis", or "local" for a group of one rank.
        prefix: of all keys; runs that share a store have different ones.
        host, port: of the server, for "torch".
        redis: the server, for "redis".
        secret: keys the checksums of payloads; the ranks of a run share it, the store doesn't know it.
    """

    kind: str
    prefix: str
    host: str = ""
    port: int = 0
    redis: RedisSettings | None = field(default=None, repr=False)
    secret: bytes = field(default=b"", repr=False)

    def open(self, timeout: float = 30.0) -> PlanStore:
        """Connect. Raises StoreError if there is no server."""
        if self.kind == "local":
            return LocalStore(self.prefix)
        if self.redis is not None:
            from hf_dcp.lookahead.redis_store import RedisStore

            return RedisStore(self.redis, self.prefix, min(timeout, REDIS_ANSWER_S))
        return TorchStore(self.host, self.port, self.prefix, timeout)


class LocalStore:
    """A store inside one process, for all its threads."""

    _values: ClassVar[defaultdict[str, dict[str, bytes]]] = defaultdict(dict)
    _changed = threading.Condition()

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix

    def put(self, key: str, data: bytes) -> None:
        self.replace({key: data})

    def replace(self, values: Mapping[str, bytes], forget: Iterable[str] = ()) -> None:
        with self._changed:
            own = self._values[self.prefix]
            for key in forget:
                own.pop(key, None)
            own.update((key, bytes(data)) for key, data in values.items())
            self._changed.notify_all()

    def get(self, key: str, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        values = self._values[self.prefix]
        with self._changed:
            while key not in values:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise StoreTimeout(f"no value after {timeout:g} s")
            return values[key]

    def delete(self, *keys: str) -> None:
        self.replace({}, keys)

    def clear(self) -> None:
        with self._changed:
            self._values.pop(self.prefix, None)


class TorchStore:
    """A client of the TCP store of torch.distributed.

    Args:
        timeout: seconds to wait for the server.

    Raises:
        StoreError: if no server answers.
    """

    def __init__(self, host: str, port: int, prefix: str, timeout: float = 30.0) -> None:
        import torch.distributed as dist

        self._errors: tuple[type[Exception], ...] = (dist.DistError, RuntimeError)
        self._timeouts: tuple[type[Exception], ...] = (dist.DistStoreError,)
        limit = timedelta(seconds=timeout)
        client = self._ask(dist.TCPStore, host, port, is_master=False, wait_for_workers=False, timeout=limit)
        self._store = dist.PrefixStore(prefix, client)

    def put(self, key: str, data: bytes) -> None:
        chunks = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)] or [b""]
        for i, chunk in enumerate(chunks[1:], 1):
            self._ask(self._store.set, f"{key}#{i}", chunk)
        # The first chunk comes last, with their number: who sees it can read the others.
        self._ask(self._store.set, key, len(chunks).to_bytes(4, "little") + chunks[0])

    def replace(self, values: Mapping[str, bytes], forget: Iterable[str] = ()) -> None:
        self.delete(*forget)
        for key, data in values.items():
            self.put(key, data)

    def get(self, key: str, timeout: float) -> bytes:
        self._wait([key], timeout)
        first = self._ask(self._store.get, key)
        count = int.from_bytes(first[:4], "little")
        if count > MOST_CHUNKS:
            raise StoreError(f"the value claims to have {count} chunks; {MOST_CHUNKS} is the most")
        names = [f"{key}#{i}" for i in range(1, count)]
        if names:
            self._wait(names, timeout)
        return b"".join([first[4:], *(self._ask(self._store.get, name) for name in names)])

    def delete(self, *keys: str) -> None:
        for key in keys:
            i = 0
            while self._ask(self._store.delete_key, f"{key}#{i}" if i else key):
                i += 1

    def clear(self) -> None:
        """Nothing to do: the server ends with the run."""

    def _wait(self, keys: list[str], timeout: float) -> None:
        # Not Store.wait: it complains in the log, and a process that is told to end would not hear it.
        poll(lambda: self._ask(self._store.check, keys), timeout)

    def _ask(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except self._timeouts as error:
            raise StoreTimeout(_first_line(error)) from error
        except self._errors as error:
            raise StoreError(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
