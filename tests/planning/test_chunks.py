"""Contiguous chunks of uneven length: the cheapest cut, and plans made of them."""

from __future__ import annotations

from itertools import combinations_with_replacement

import numpy as np
import pytest

from hf_dcp import masks
from hf_dcp.planning import BatchSpec, ModelShape, Topology, plan_batch
from hf_dcp.planning.placement.chunks import _cheapest

SHAPE = ModelShape(8, 2, 64)


@pytest.mark.parametrize("seed", range(12))
def test_no_other_cut_is_cheaper(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points, chunks = int(rng.integers(3, 8)), int(rng.integers(1, 5))
    at = np.concatenate([[0], np.cumsum(rng.integers(1, 9, points))])
    work = np.concatenate([[0], np.cumsum(rng.integers(1, 9, points))])
    need, price = rng.integers(0, 9, points).astype(float), rng.integers(1, 5, chunks).astype(float)
    most = (at[-1] / chunks * 1.4, work[-1] / chunks * 1.5)
    best = np.inf
    for inner in combinations_with_replacement(range(points + 1), chunks - 1):
        bounds = np.array([0, *inner, points])
        if np.all(np.diff(at[bounds]) <= most[0]) and np.all(np.diff(work[bounds]) <= most[1]):
            filled = np.flatnonzero(np.diff(bounds))
            best = min(best, float((need[bounds[:-1][filled]] * price[filled]).sum()))
    cost, first = _cheapest(at, work, need, price, *most)
    assert cost == best
    if np.isfinite(best):
        bounds = np.append(first, points)
        assert bounds[0] == 0 and np.all(np.diff(at[bounds]) <= most[0]) and np.all(np.diff(work[bounds]) <= most[1])


@pytest.mark.parametrize("topology", [Topology.grid(4, 8), Topology((0, 1, 1, 0, 1, 0, 0, 2) * 3)])
def test_few_sequences_with_windows_are_laid_end_to_end(topology: Topology) -> None:
    batch = BatchSpec([9000, 16000, 4000], masks.sliding_window(512))
    plan = plan_batch(batch, topology, SHAPE)
    plan.check()
    assert plan.placement.name == "contiguous, uneven" and plan.score.status == "ok"
    sent, row = plan.score.passes["forward"], 2 * 2 * 64 * 2  # bytes of a KV row: K and V, heads, dim, bf16
    assert sent.inter_node + sent.intra_node <= topology.world_size * 511 * row
