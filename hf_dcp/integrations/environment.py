"""The environment variables of this package: a launcher's YAML file can't carry its settings, variables can."""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from hf_dcp.config import DcpConfig

PREFIX = "HF_DCP_"
VARIABLES = {
    "HF_DCP_SIZE": "dcp_size",
    "HF_DCP_BLOCK_SIZE": "block_size of the DcpConfig",
    "HF_DCP_PLACEMENT": "placement of the DcpConfig",
    "HF_DCP_PLAN_STORE": "plan_store",
    "HF_DCP_PLAN_TIMEOUT": "plan_timeout",
    "HF_DCP_LOOKAHEAD": "lookahead",
    "HF_DCP_NODE": "name of the node of this process, in place of the host name",
    "HF_DCP_REDIS_USERNAME": "user of the Redis server",
    "HF_DCP_REDIS_PASSWORD": "password of the Redis server",
    "HF_DCP_REDIS_CA": "file of the authority that signed the Redis server's certificate",
    "HF_DCP_REDIS_CERT": "file of this client's certificate",
    "HF_DCP_REDIS_KEY": "file of this client's key",
    "HF_DCP_VENV": "virtual environment of the scripts",
    "HF_DCP_OLDEST_VENV": "virtual environment with the oldest libraries, of scripts/test_oldest.sh",
    "HF_DCP_SCREENSHOTS": "folder for pictures that tests make",
}
"""Every variable that is read, and what it sets."""


def require_known_variables(environment: Mapping[str, str]) -> None:
    """Raise ValueError for a variable of ours that nobody reads: what it should set would silently stay unset."""
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in VARIABLES:
            near = get_close_matches(name, VARIABLES, 1)
            meant = f"; {near[0]} was perhaps meant" if near else ""
            raise ValueError(f"the environment variable {name} is not known{meant}: unset it, or correct its name")


def setting(name: str, given: Any, variable: str, default: Any, kind: type) -> Any:
    """The given value, else that of the environment variable, else the default. Raises ValueError for another kind."""
    if given is None:
        text = os.environ.get(variable)
        if text is None:
            return default
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"{variable} must be a number, not {text!r}") from None
    if isinstance(given, bool) or not isinstance(given, (int, kind)):
        raise ValueError(f"{name} must be {'an integer' if kind is int else 'a number'}, not {given!r}")
    return given


def config_from_environment() -> DcpConfig:
    """How batches are planned, as far as variables say it. Raises ValueError for a block size that is none."""
    block_size = os.environ.get("HF_DCP_BLOCK_SIZE", "auto")
    if block_size != "auto" and not block_size.isdecimal():
        raise ValueError(f'HF_DCP_BLOCK_SIZE must be an integer of at least 1 or "auto", not {block_size!r}')
    placement = os.environ.get("HF_DCP_PLACEMENT", "auto")
    return DcpConfig(block_size="auto" if block_size == "auto" else int(block_size), placement=placement)
