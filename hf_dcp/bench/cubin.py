"""What a compiled kernel needs of a GPU, read from its cubin."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from triton import knobs

LABEL = re.compile(r"^(\.L\w+):")
BRANCH = re.compile(r"\bBRA\b.*`\((\.L\w+)\)")
SPILL = re.compile(r"\b(STL|LDL)\b")
"""Instructions that store to and load from local memory: these kernels have no arrays there, only spilled registers."""


@dataclass(frozen=True)
class Resources:
    """Of one kernel.

    Args:
        registers: of a thread.
        spilled: bytes of a thread's registers that have a place in memory instead.
        spilled_in_loops: instructions inside a loop that store or load such registers; those outside are executed once.
    """

    registers: int
    spilled: int
    spilled_in_loops: int


def resources_of(cubin: bytes) -> Resources:
    """Of the kernel in a cubin, as the GPU would execute it: nothing is compiled again.

    Raises:
        ValueError: if the tools of Triton say something that isn't understood.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        used = _said(knobs.nvidia.cuobjdump.path, "-res-usage", str(path))
        assembly = _said(knobs.nvidia.nvdisasm.path, "-c", str(path))
    found = re.search(r"REG:(\d+) STACK:(\d+) ", used)
    if found is None:
        raise ValueError(f"cuobjdump says neither registers nor stack: {used!r}")
    return Resources(int(found[1]), int(found[2]), spills_in_loops(assembly))


def spills_in_loops(assembly: str) -> int:
    """Instructions between a label and a later branch back to it that store or load spilled registers."""
    lines = assembly.splitlines()
    labels = {found[1]: n for n, line in enumerate(lines) if (found := LABEL.match(line))}
    branches = ((n, found[1]) for n, line in enumerate(lines) if (found := BRANCH.search(line)))
    loops = [(labels[label], end) for end, label in branches if labels[label] < end]
    spills = [n for n, line in enumerate(lines) if SPILL.search(line)]
    return sum(any(start < n < end for start, end in loops) for n in spills)


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
