"""Registration with Transformers when it is there, and otherwise as soon as it is imported.

Importing Transformers takes seconds, which planning and the command line need not wait for.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

AWAITED = "transformers.modeling_utils"
"""The module of Transformers that knows attention implementations; every model needs it."""
OURS = "hf_dcp.integrations.attention"
"""The module of ours that registers itself when it is imported."""


def register_with_transformers() -> None:
    """Register now if Transformers' models are imported, else right after they are."""
    if AWAITED in sys.modules:
        importlib.import_module(OURS)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the awaited module as everybody does, once, and has it loaded by `_Loader`."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != AWAITED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loads by another loader, and then registers."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader  # who asks for the source (inspect) gets it
        module.__loader__ = self.loader
        importlib.import_module(OURS)
