"""Where a Redis server is and how to log in: from a URL and environment variables, without ever showing a credential."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

SCHEMES = ("redis", "rediss")
FORM = "redis://user:password@host:6379/0, or rediss:// for TLS, with the special characters of a password escaped"
OPTIONS = ("prefix", "expiry", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


@dataclass(frozen=True)
class RedisSettings:
    """A Redis server.

    Args:
        tls: whether the connection is encrypted; the server's certificate is then checked, its host name too.
        ca: file with the certificates of the authority that signed the server's; "": those of the system.
        certificate, key: files of this client's own certificate, where the server wants one.
        prefix: the first part of every key.
        expiry: seconds after which the server forgets what nobody has deleted.
    """

    host: str
    port: int = 6379
    database: int = 0
    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    tls: bool = False
    ca: str = ""
    certificate: str = ""
    key: str = ""
    prefix: str = "hf_dcp"
    expiry: int = 3600

    def __str__(self) -> str:
        """The address, without credentials."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{host}:{self.port}/{self.database}"

    @classmethod
    def parse(cls, url: str, environment: Mapping[str, str] | None = None) -> RedisSettings:
        """Settings from a URL; what it leaves open comes from the environment.

        Args:
            url: ``redis[s]://[user[:password]@]host[:port][/database][?option=value&...]``, options: `OPTIONS`.
            environment: None: that of this process. ``HF_DCP_REDIS_USERNAME``, ``..._PASSWORD``, ``..._CA``,
                ``..._CERT`` and ``..._KEY`` are read.

        Raises:
            ValueError: for a URL that can't be read, or files that aren't there; the text shows no part of the URL.
        """
        environment = os.environ if environment is None else environment
        try:
            parts = urlsplit(url)
            port, host = parts.port, parts.hostname
        except ValueError:
            raise ValueError(f"plan_store is not a URL that can be read: write {FORM}") from None
        if parts.scheme not in SCHEMES or not host or parts.fragment:
            raise ValueError(f"plan_store is not a URL of a Redis server: write {FORM}")
        database = parts.path.strip("/")
        if database and not database.isdecimal():
            raise ValueError(f"plan_store must end in the number of a database, or in nothing: write {FORM}")
        options = _options(parts.query)
        settings = cls(
            host=host,
            port=port or 6379,
            database=int(database or 0),
            username=unquote(parts.username or "") or environment.get("HF_DCP_REDIS_USERNAME", ""),
            password=unquote(parts.password or "") or environment.get("HF_DCP_REDIS_PASSWORD", ""),
            tls=parts.scheme == "rediss",
            ca=options.get("ssl_ca_certs") or environment.get("HF_DCP_REDIS_CA", ""),
            certificate=options.get("ssl_certfile") or environment.get("HF_DCP_REDIS_CERT", ""),
            key=options.get("ssl_keyfile") or environment.get("HF_DCP_REDIS_KEY", ""),
            prefix=options.get("prefix", "hf_dcp"),
            expiry=int(options.get("expiry", 3600)),
        )
        settings._check()
        return settings

    def _check(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.:/-]{1,100}", self.prefix):
            raise ValueError(
                "the prefix of plan_store may have letters, digits and _ . : / - and at most 100 of them: choose such a one"
            )
        if self.expiry < 60:
            raise ValueError(f"the expiry of plan_store is {self.expiry} seconds: write at least 60")
        for name, path in (("CA", self.ca), ("CERT", self.certificate), ("KEY", self.key)):
            if path and not self.tls:
                raise ValueError(f"HF_DCP_REDIS_{name} is set, but plan_store is not encrypted: write rediss://...")
            if path and not Path(path).is_file():
                raise ValueError(f"HF_DCP_REDIS_{name} (or its option in plan_store) names {path}, which is no file")


def _options(query: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in options:
        if name not in OPTIONS:
            raise ValueError(f"plan_store has an option that is not known: the options are {', '.join(OPTIONS)}")
    if not options.get("expiry", "0").isdecimal():
        raise ValueError("the expiry of plan_store must be a whole number of seconds, such as expiry=3600")
    return options
