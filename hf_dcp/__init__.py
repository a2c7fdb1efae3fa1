"""Dynamic Context Parallelism for Hugging Face Transformers and Accelerate.

Importing this package, where torch is installed, makes ``attn_implementation="dcp"`` known to Transformers. Where
torch is absent, masks and `hf_dcp.planning` work all the same.
"""

from __future__ import annotations

import importlib
import importlib.util
from importlib import metadata
from typing import TYPE_CHECKING, Any

from hf_dcp.config import DcpConfig
from hf_dcp.masks import (
    Mask,
    causal,
    causal_blockwise,
    documents,
    from_ranges,
    full,
    lambda_mask,
    parse_mask,
    shared_question,
    sliding_window,
)

if TYPE_CHECKING:
    from hf_dcp.data.loader import DcpDataLoader
    from hf_dcp.integrations.accelerate import DcpParallelismConfig
    from hf_dcp.integrations.trace import DcpTraceCallback
    from hf_dcp.integrations.trainer import DcpStatsCallback

try:
    __version__ = metadata.version("hf-dcp")
except metadata.PackageNotFoundError:  # used from its sources
    __version__ = "0+unknown"

_LAZY = {
    "DcpDataLoader": "hf_dcp.data.loader",
    "DcpParallelismConfig": "hf_dcp.integrations.accelerate",
    "DcpStatsCallback": "hf_dcp.integrations.trainer",
    "DcpTraceCallback": "hf_dcp.integrations.trace",
}

__all__ = [
    "DcpConfig",
    "DcpDataLoader",
    "DcpParallelismConfig",
    "DcpStatsCallback",
    "DcpTraceCallback",
    "Mask",
    "__version__",
    "causal",
    "causal_blockwise",
    "documents",
    "from_ranges",
    "full",
    "lambda_mask",
    "parse_mask",
    "shared_question",
    "sliding_window",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'hf_dcp' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # a blocked or half-installed package
        return False


if all(_installed(name) for name in ("torch", "transformers", "accelerate")):
    from hf_dcp.integrations.on_import import register_with_transformers
    from hf_dcp.integrations.versions import check_versions

    check_versions()
    register_with_transformers()
