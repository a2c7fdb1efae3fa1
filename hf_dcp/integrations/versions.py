"""The library versions that hf_dcp needs, checked at import."""

from __future__ import annotations

import re
from importlib import metadata

MINIMUM = {"torch": (2, 13), "transformers": (5, 24), "accelerate": (1, 15)}


def check_versions(installed: dict[str, str] | None = None) -> None:
    """Raise ImportError if a library is too old, with the command that helps.

    Args:
        installed: version texts by name, in place of those of this environment.
    """
    for name, least in MINIMUM.items():
        text = installed[name] if installed is not None else metadata.version(name)
        if _release(text) < least:
            wanted = ".".join(map(str, least))
            raise ImportError(f'hf_dcp needs {name} {wanted} or newer, found {text}: pip install "{name}>={wanted}"')


def _release(text: str) -> tuple[int, ...]:
    """(major, minor, ...) of a version text such as ``2.13.0+cu130`` or ``5.24.0.dev0``."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
