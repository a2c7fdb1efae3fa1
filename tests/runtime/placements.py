"""Placements for tests: any at all, so that tiles run at the owner of their Q, of their KV, or elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hf_dcp.planning.placement import Placement


def random_placement(
    seed: int, owners: int | None = None, workers: int | None = None, idle: int = 0
) -> Callable[..., Placement]:
    """A solver for `plan_batch` that places blocks and tiles at random.

    Args:
        owners: only the first so many ranks own tokens.
        workers: only the last so many ranks compute tiles.
        idle: the last so many ranks do neither, whatever else is asked for.
    """

    def solve(problem: Any, config: Any) -> Placement:
        rng = np.random.default_rng(seed)
        world = problem.topology.world_size - idle
        block_device = rng.integers(0, min(owners or world, world), len(problem.blocks)).astype(np.int32)
        first = world - min(workers or world, world)
        tiles = tuple(
            rng.integers(first, world, (len(part), problem.head_groups)).astype(np.int32) for part in problem.tiles
        )
        return Placement("random", block_device, tiles)

    return solve
