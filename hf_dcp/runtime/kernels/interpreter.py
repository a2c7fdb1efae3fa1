"""Whether Triton interprets kernels on the CPU, for tests. Importable where Triton is not installed."""

from __future__ import annotations

import os


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
