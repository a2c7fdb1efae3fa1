"""Names of tests, as tables give them: does such a test exist?"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]


def exists(name: str) -> bool:
    """Whether ``path::function`` names a test function."""
    path, _, function = name.partition("::")
    return function.partition("[")[0] in functions(path)


@functools.cache
def functions(path: str) -> frozenset[str]:
    """The test functions of a file; none if there is no such file."""
    file = ROOT / path
    if not file.is_file():
        return frozenset()
    found = ast.walk(ast.parse(file.read_text()))
    return frozenset(n.name for n in found if isinstance(n, ast.FunctionDef) and n.name.startswith("test_"))
