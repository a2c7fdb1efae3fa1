"""The library versions that hf_dcp works with, checked at import."""

from __future__ import annotations

import re
from importlib import metadata

OLDEST = {"torch": (2, 13), "transformers": (5, 20), "accelerate": (1, 12)}
"""The oldest minor releases that pass the tests; pyproject.toml has the same."""
BEFORE = {"torch": (3,), "transformers": (6,), "accelerate": (2,)}
"""The first releases that may break what this package builds on."""


def check_versions(installed: dict[str, str] | None = None) -> None:
    """Raise ImportError if a library is too old or too new, with the command that helps.

    Args:
        installed: version texts by name, in place of those of this environment.
    """
    for name, least in OLDEST.items():
        text = installed[name] if installed is not None else metadata.version(name)
        found, first, end = _release(text), _text(least), _text(BEFORE[name])
        if found < least:
            raise ImportError(
                f'hf_dcp needs {name} {first} or newer, found {text}: pip install "{name}>={first},<{end}"'
            )
        if found >= BEFORE[name]:
            raise ImportError(f'hf_dcp needs {name} before {end}, found {text}: pip install "{name}>={first},<{end}"')


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def _release(text: str) -> tuple[int, ...]:
    """(major, minor, ...) of a version text such as ``2.13.0+cu130`` or ``5.24.0.dev0``."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
