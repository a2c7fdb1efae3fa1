"""A plan store on a Redis server, for runs on several machines."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Mapping
from multiprocessing.util import Finalize
from typing import Any

from hf_dcp.lookahead.redis_settings import RedisSettings
from hf_dcp.lookahead.store import StoreAddress, StoreError, poll

MOST_BYTES = 256 << 20
"""Longer values are neither written nor fetched."""
REDIS_EXTRA = "by a Redis URL: redis-py is not installed; pip install 'hf-dcp[redis]'"
COMMANDS = "PING, SET, GETRANGE, DEL and SCAN"


class RedisStore:
    """A client of a Redis server: a pool of connections, made when needed and again when they break.

    Args:
        prefix: of all keys; runs that share a server have different ones.
        timeout: seconds until a server that doesn't answer is given up.

    Raises:
        StoreError: if the server can't be used; the text says what is wrong, in one sentence without credentials.
    """

    def __init__(self, settings: RedisSettings, prefix: str, timeout: float = 3.0) -> None:
        self._settings = settings
        self._prefix = prefix
        self._timeout = timeout
        self._redis = _client(settings, timeout)
        self._ask(self._redis.ping)

    def put(self, key: str, data: bytes) -> None:
        self.replace({key: data})

    def replace(self, values: Mapping[str, bytes], forget: Iterable[str] = ()) -> None:
        if any(len(data) > MOST_BYTES for data in values.values()):
            raise StoreError(f"a value has more than {MOST_BYTES} bytes, the most that a plan store takes")
        exchange = self._redis.pipeline(transaction=False)
        old = [self._name(key) for key in forget]
        if old:  # first: it makes room
            exchange.delete(*old)
        for key, data in values.items():
            exchange.set(self._name(key), data, ex=self._settings.expiry)
        self._ask(exchange.execute)

    def get(self, key: str, timeout: float) -> bytes:
        # Not GET: a value of any size could lie there. An absent one is empty.
        data: bytes = poll(lambda: self._ask(self._redis.getrange, self._name(key), 0, MOST_BYTES), timeout)
        if len(data) > MOST_BYTES:
            raise StoreError(f"a value has more than {MOST_BYTES} bytes, the most that a plan store takes")
        return data

    def delete(self, *keys: str) -> None:
        self.replace({}, keys)

    def clear(self) -> None:
        """Forget every value with this prefix. Raises StoreError."""
        for name in self._ask(lambda: list(self._redis.scan_iter(match=self._name("*"), count=1000))):
            self._ask(self._redis.delete, name)

    def check(self) -> None:
        """Try every command that is needed. Raises StoreError if one is refused."""
        key = f"check-{secrets.token_hex(4)}"
        self.put(key, b"x")
        self.get(key, self._timeout)
        self.delete(key)
        self._ask(self._redis.scan, 0, self._name("check-*"))

    def close(self) -> None:
        self._redis.close()

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _ask(self, function: Any, *args: Any, **options: Any) -> Any:
        import redis

        try:
            return function(*args, **options)
        except (redis.RedisError, OSError) as error:
            # Not chained: the sentence says it all, and no library's text comes with it.
            raise StoreError(f"{self._settings}: {_explain(error, self._settings, self._timeout)}") from None


def clear_at_exit(address: StoreAddress) -> None:
    """When this process ends, and after its DataLoader workers have, take all that the run has left out of the store."""
    Finalize(None, _clear, (address,), exitpriority=-20)


def _clear(address: StoreAddress) -> None:
    with contextlib.suppress(StoreError):
        address.open().clear()


def _client(settings: RedisSettings, timeout: float) -> Any:
    import redis
    from redis.backoff import ExponentialBackoff
    from redis.retry import Retry

    options: dict[str, Any] = {}
    if settings.username or settings.password:
        # Not as username and password: those are in the repr of connection pools.
        options["credential_provider"] = redis.UsernamePasswordCredentialProvider(
            settings.username or None, settings.password or None
        )
    if settings.tls:
        options |= {
            "ssl": True,
            "ssl_cert_reqs": "required",
            "ssl_check_hostname": True,
            "ssl_ca_certs": settings.ca or None,
            "ssl_certfile": settings.certificate or None,
            "ssl_keyfile": settings.key or None,
        }
    return redis.Redis(
        host=settings.host,
        port=settings.port,
        db=settings.database,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        # At once for a connection that an idle server has closed; longer pauses are StoreLink's.
        retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), 2, (redis.ConnectionError,)),
        max_connections=4,
        **options,
    )


def _explain(error: Exception, settings: RedisSettings, timeout: float) -> str:
    """What is wrong and what to do about it."""
    text = (str(error).splitlines() or [""])[0]
    low = text.lower()
    database = f"the server has no database {settings.database}: end plan_store in a lower number, such as /0"
    silent = f"no answer within {timeout:g} s" + (", or it doesn't speak TLS at this port" if settings.tls else "")
    for sign, answer in (
        ("wrongpass", "the user name or the password is wrong: see HF_DCP_REDIS_USERNAME and HF_DCP_REDIS_PASSWORD"),
        ("invalid username-password", "the user name or the password is wrong: see HF_DCP_REDIS_USERNAME and "
         "HF_DCP_REDIS_PASSWORD"),
        ("without any password configured", "the server has no password, but one was given: leave it out"),
        ("authentication required", "the server wants a password: set HF_DCP_REDIS_PASSWORD"),
        ("hello must be called", "the server wants a password: set HF_DCP_REDIS_PASSWORD"),
        ("noauth", "the server wants a password: set HF_DCP_REDIS_PASSWORD"),
        ("permission", f"the user may not do all that is needed: let it use {COMMANDS} on the keys {settings.prefix}/*"),
        ("noperm", f"the user may not do all that is needed: let it use {COMMANDS} on the keys {settings.prefix}/*"),
        ("db index", database),
        ("invalid database", database),
        ("certificate_verify_failed", "the server's certificate is not one that the given CA has signed for this host: "
         "see HF_DCP_REDIS_CA"),
        ("certificate verify failed", "the server's certificate is not one that the given CA has signed for this host: "
         "see HF_DCP_REDIS_CA"),
        ("wrong version number", "the server doesn't speak TLS at this port: write redis://, or name its TLS port"),
        ("record layer failure", "the server doesn't speak TLS at this port: write redis://, or name its TLS port"),
        ("maxmemory", "the server's memory is full (maxmemory)"),
        ("refused", "nothing answers there: see that the server runs, and that host and port are right"),
        ("name or service not known", "the host name is not known"),
        ("name resolution", "the host name is not known"),
        ("timed out", silent),
        ("timeout", silent),
        ("closed by server", "the server closes the connection: for a TLS port write rediss://"),
        ("reset by peer", "the server closes the connection: for a TLS port write rediss://"),
    ):  # fmt: skip
        if sign in low:
            return answer
    for secret in (settings.password, settings.username):
        text = text.replace(secret, "***") if len(secret) > 2 else text
    return text or type(error).__name__
