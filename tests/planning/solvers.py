"""Placements for tests: as wild as the planner must be able to schedule."""

from __future__ import annotations

import numpy as np

from hf_dcp.planning.placement import Placement
from hf_dcp.planning.planner import Solver


def random_solver(seed: int, stay: float = 0.3) -> Solver:
    """Blocks anywhere, maybe not on every device; tiles at the owner of Q with chance ``stay``, else anywhere."""

    def solve(problem, config):
        rng, world = np.random.default_rng(seed), problem.topology.world_size
        owners = rng.permutation(world)[: rng.integers(1, world + 1)]
        blocks = rng.choice(owners, len(problem.blocks)).astype(np.int32)
        devices = []
        for tiles in problem.tiles:
            anywhere = rng.integers(0, world, (len(tiles), problem.head_groups))
            home = rng.random(anywhere.shape) < stay
            devices.append(np.where(home, blocks[tiles.q][:, None], anywhere).astype(np.int32))
        return Placement("random", blocks, tuple(devices))

    return solve
