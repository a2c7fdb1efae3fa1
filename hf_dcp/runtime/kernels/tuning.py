"""Tile shapes of the Triton kernels: which there are, and which one is taken."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

MOST_PACKED = 16
"""Query heads of one KV head that a block holds at most."""
HEAD_DIMS = (16, 32, 48, 64, 80, 96, 128, 192, 256)
"""Head dims of the kernels: a power of 2, or the sum of two, each at least 16."""


@dataclass(frozen=True)
class Shape:
    """A tile shape: rows (tokens times packed query heads), columns, warps, and stages of the load pipeline."""

    rows: int
    columns: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}, {self.warps} warps, {self.stages} stages"


@dataclass(frozen=True)
class Config:
    """A tile shape for so many packed heads."""

    shape: Shape
    pack: int

    @property
    def tokens(self) -> int:
        """Tokens of a Q block."""
        return self.shape.rows // self.pack

    @property
    def rows(self) -> int:
        return self.shape.rows

    @property
    def columns(self) -> int:
        return self.shape.columns

    @property
    def warps(self) -> int:
        return self.shape.warps

    @property
    def stages(self) -> int:
        return self.shape.stages


def head_parts(head_dim: int) -> tuple[int, int]:
    """A head dim as a sum of two powers of 2, the second 0 if it is one itself."""
    first = 1 << (head_dim.bit_length() - 1)
    return first, head_dim - first


def packed(per_kv_head: int) -> int:
    """Heads that a block holds together: all of a KV head, or the largest part of them that is not above the most."""
    return next(n for n in range(min(per_kv_head, MOST_PACKED), 0, -1) if per_kv_head % n == 0)


SHAPES: dict[str, dict[int, tuple[Shape, ...]]] = {
    "forward": {
        64: (Shape(128, 64, 8, 3), Shape(64, 64, 4, 2)),
        128: (Shape(128, 64, 8, 2), Shape(64, 64, 8, 2)),
        256: (Shape(64, 32, 8, 1),),
    },
    "dq": {
        64: (Shape(128, 64, 8, 2), Shape(64, 64, 4, 2)),
        128: (Shape(64, 64, 8, 2),),
        192: (Shape(64, 32, 8, 1),),
        256: (Shape(32, 32, 8, 1),),
    },
    "dkv": {
        64: (Shape(64, 64, 4, 2),),
        128: (Shape(32, 64, 8, 2),),
        256: (Shape(32, 32, 8, 1),),
    },
}
"""Tile shapes by kernel and the largest head dim that they are for; the first of each is the default."""


def shapes(kernel: str, head_dim: int) -> tuple[Shape, ...]:
    """The tile shapes that a kernel is shipped with for a head dim, the default first."""
    table = SHAPES[kernel]
    return table[min(size for size in table if size >= head_dim)]


_TUNED: dict[tuple[str, int], Shape] = {}


def config(kernel: str, head_dim: int, per_kv_head: int) -> Config:
    """What a kernel runs with: the default, or what `load` has read. It is never timed while training, so that results
    are equal to the bit in every process and on every rank."""
    shape = _TUNED.get((kernel, head_dim)) or shapes(kernel, head_dim)[0]
    return Config(shape, packed(per_kv_head))


def load(path: str | Path) -> None:
    """Take the tile shapes of a file that ``hf-dcp bench kernels --tune FILE`` has written. Call it on every rank.

    Raises:
        ValueError: if the file names a shape that isn't shipped.
    """
    for entry in json.loads(Path(path).read_text()):
        kernel, head_dim, text = entry["kernel"], entry["head_dim"], entry["shape"]
        known = {str(shape): shape for shape in shapes(kernel, head_dim)} if kernel in SHAPES else {}
        if text not in known:
            raise ValueError(
                f"{path} names {kernel} {text!r}, which isn't shipped: run hf-dcp bench kernels --tune again"
            )
        _TUNED[kernel, head_dim] = known[text]
