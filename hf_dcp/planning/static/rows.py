"""The rows that ranks hold under a static scheme, and their slots."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hf_dcp.planning.static.layout import Grid
from hf_dcp.planning.tiles import Blocks
from hf_dcp.planning.uses import LocalRows

Q, KV = 0, 1


@dataclass(frozen=True)
class DenseRows:
    """A member m of a team holds head group m: the Q rows of its team's blocks, the KV rows of all blocks."""

    blocks: Blocks
    grid: Grid
    local: LocalRows

    @property
    def groups(self) -> int:
        return self.grid.team

    @cached_property
    def position(self) -> np.ndarray:
        """int32[blocks]: ring position of every block."""
        return self.grid.index[self.local.device, 0]

    @cached_property
    def _remote(self) -> tuple[np.ndarray, np.ndarray]:
        """bool[world_size, blocks] each: whether a block's Q rows, and its KV rows, are remote rows of a rank."""
        foreign = self.local.device[None] != np.arange(len(self.local.count))[:, None]
        return foreign & (self.position[None] == self.grid.index[:, :1]), foreign

    @cached_property
    def _first_slot(self) -> tuple[np.ndarray, np.ndarray]:
        """int64[world_size, blocks] each: slot of the first remote row of a block."""
        base = self.local.count[:, None] * self.groups
        sizes = [remote * self.blocks.size for remote in self._remote]
        first = [base + np.cumsum(size, 1) - size for size in sizes]
        return first[0], first[1]

    def slot(self, side: int, rank: np.ndarray, block: np.ndarray, group: np.ndarray) -> np.ndarray:
        """Slot of the first row of a block and group on a rank that holds it: int64[...]."""
        owned = self.local.device[block] == rank
        zero = np.zeros(1, np.int64)
        return np.where(owned, self.local.slot(block, zero, group, self.groups), self._first_slot[side][rank, block])

    def step(self, rank: np.ndarray, block: np.ndarray) -> np.ndarray:
        """Slots from one row of a block to the next."""
        return np.where(self.local.device[block] == rank, self.groups, 1)

    def remote_runs(self, side: int, rank: int) -> np.ndarray:
        """int32[runs, 3] of (token, count, group) of a rank's remote rows, neighbouring blocks joined."""
        held = np.flatnonzero(self._remote[side][rank])
        start, size = self.blocks.start[held], self.blocks.size[held]
        first = np.flatnonzero(np.append(True, start[1:] != start[:-1] + size[:-1])[: len(held)])
        count = np.add.reduceat(size, first) if len(first) else size
        group = np.full(len(first), self.grid.index[rank, 1])
        return np.stack([start[first], count, group], 1).astype(np.int32)
