"""The paper's example of a hypergraph (figure 9): six tokens in blocks of two, a question and two answers that share it.

Five tiles, and nine nets: Q, KV and O of each block. Built here from the paper's words, without the planner's code.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from hf_dcp import masks
from hf_dcp.config import DcpConfig
from hf_dcp.planning import BatchSpec, ModelShape, Topology, plan_batch
from hf_dcp.planning.objective import evaluate
from hf_dcp.planning.placement.hypergraph import TOTAL_WEIGHT, make_hypergraph
from hf_dcp.planning.problem import Placement, Problem, build_problem
from hf_dcp.planning.tiles import make_blocks, make_tiles

TILES = [(0, 0), (1, 0), (1, 1), (2, 0), (2, 2)]
"""(query block, KV block) of every computation that the mask allows."""
ATTENDED = [3, 4, 3, 4, 3]
"""Elements: causal inside a block, all of the question for an answer."""
TOKENS, HEADS, DIM, ELEMENT, LSE = 2, 1, 8, 2, 4


def problem() -> Problem:
    batch = BatchSpec([6], masks.shared_question(2, [2, 2]))
    blocks = make_blocks(batch, 2)
    shape, config = ModelShape(HEADS, HEADS, DIM, "bf16"), DcpConfig(head_groups=1)
    return build_problem(batch, blocks, [make_tiles(batch, blocks)], shape, 1, config, Topology.grid(1, 2))


def nets() -> dict[tuple[str, int], tuple[int, set[int]]]:
    """The nine nets: (what, block) -> (bytes, vertices); vertices are the three blocks, then the five tiles."""
    row = HEADS * DIM * ELEMENT
    size = {"Q": row, "KV": 2 * row, "O": row + HEADS * LSE}
    side = {"Q": 0, "KV": 1, "O": 0}
    return {
        (what, block): (
            TOKENS * size[what],
            {block} | {3 + t for t, ends in enumerate(TILES) if ends[side[what]] == block},
        )
        for block in range(3)
        for what in size
    }


def connectivity(part: np.ndarray) -> int:
    """The paper's cost: bytes of every net times the parts that it touches, less one."""
    return sum(size * (len({int(part[v]) for v in vertices}) - 1) for size, vertices in nets().values())


def test_tiles_and_nets() -> None:
    found = problem()
    assert list(zip(found.tile_q.tolist(), found.tile_kv.tolist(), strict=True)) == TILES
    assert len(nets()) == 9
    assert nets()["KV", 0] == (64, {0, 3, 4, 6})
    assert nets()["O", 2] == (40, {2, 6, 7})
    graph = make_hypergraph(found)
    ours = [frozenset(graph.pins[a:b].tolist()) for a, b in zip(graph.ptr[:-1], graph.ptr[1:], strict=True)]
    # Q and O of a block have the same vertices, and are one net here
    assert sorted(map(sorted, ours)) == sorted(sorted(v) for (what, _), (_, v) in nets().items() if what != "O")


def test_vertex_weights() -> None:
    """Tiles weigh their FLOPs, blocks their bytes; a solver with one weight gets the mean of the shares."""
    found = problem()
    flops = [4 * DIM * HEADS * elements for elements in ATTENDED]
    assert (found.tile_work * 4 * DIM).tolist() == flops
    assert found.blocks.size.tolist() == [TOKENS] * 3
    weight = make_hypergraph(found).vertex_weight / TOTAL_WEIGHT
    shares = [1 / 3] * 3 + [f / sum(flops) for f in flops]
    assert weight == pytest.approx(np.array(shares) / 2, rel=1e-5)


def test_connectivity_is_the_cost_of_every_placement() -> None:
    """All 256 placements on two devices: what is sent is the paper's cost, and the hypergraph's is that of all passes."""
    found, graph = problem(), make_hypergraph(problem())
    spans = list(zip(graph.ptr[:-1], graph.ptr[1:], strict=True))
    for choice in product((0, 1), repeat=8):
        part = np.array(choice, np.int32)
        score = evaluate(found, Placement("example", part[:3], (part[3:, None],)))
        assert score.passes["forward"].intra_node == connectivity(part)
        cut = sum(w * (len(set(part[graph.pins[a:b]])) - 1) for (a, b), w in zip(spans, graph.net_weight, strict=True))
        assert cut == score.passes["forward"].intra_node + score.passes["backward"].intra_node


def test_the_search_finds_the_best_balanced_placement() -> None:
    """Of all placements within the limits that the pieces permit, none costs less."""
    batch, shape = BatchSpec([6], masks.shared_question(2, [2, 2])), ModelShape(HEADS, HEADS, DIM, "bf16")
    plan = plan_batch(batch, Topology.grid(1, 2), shape, DcpConfig(block_size=2, head_groups=1))
    placements = (np.array(choice, np.int32) for choice in product((0, 1), repeat=8))
    scores = [evaluate(problem(), Placement("example", part[:3], (part[3:, None],))) for part in placements]
    assert plan.score.key == min(score.key for score in scores)
