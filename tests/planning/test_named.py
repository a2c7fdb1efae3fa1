"""Placements asked for by name: static schemes and general partitioners."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from hf_dcp import masks
from hf_dcp.config import DcpConfig
from hf_dcp.planning import BatchSpec, ModelShape, Plan, Topology, plan_batch
from hf_dcp.planning.objective import evaluate
from hf_dcp.planning.placement.hypergraph import make_hypergraph
from hf_dcp.planning.placement.portfolio import solve

SHAPE = ModelShape(4, 2, 8, "fp32")
BATCH = BatchSpec([900, 300, 77, 1], masks.causal())


def planned(placement: str, **settings: object) -> Plan:
    plan = plan_batch(BATCH, Topology.grid(2, 2), SHAPE, DcpConfig(placement=placement, **settings))
    plan.check()
    return plan


def needs(solver: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(solver) is None, reason=f"{solver} is not installed")


SOLVERS = [pytest.param("mtkahypar"), pytest.param("kahypar", marks=needs("kahypar"))]


@pytest.mark.parametrize("name", ["ring", "zigzag", "head-ring"])
@pytest.mark.parametrize("block_size", ["auto", 50])
def test_static_schemes_put_tokens_where_they_do(name: str, block_size: object) -> None:
    plan = planned(name, block_size=block_size)
    assert plan.placement.name == name
    device = plan.placement.block_device
    owner = np.repeat(device, plan.blocks.size)[:900]  # the longest sequence
    chunks = 4 if name == "ring" else 8
    expected = np.arange(4) if name == "ring" else np.array([0, 1, 2, 3, 3, 2, 1, 0])
    bounds = 900 * np.arange(chunks + 1) // chunks
    assert np.array_equal(owner, np.repeat(expected, np.diff(bounds)))


def test_ring_computes_at_the_queries_and_head_ring_in_teams() -> None:
    ring, heads = planned("zigzag"), planned("head-ring")
    for plan, spread in ((ring, 1), (heads, 2)):
        tile_device = plan.placement.tile_device[0]
        owner = plan.placement.block_device[plan.tiles[0].q]
        if spread == 1:
            assert np.all(tile_device == owner[:, None])
        else:
            assert np.all(np.sort(tile_device, 1) == (owner // 2 * 2)[:, None] + np.arange(2))


@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_meet_both_limits_and_are_pure(name: str) -> None:
    plan = planned(name)
    assert plan.placement.name == name
    assert plan.score.excess == 0
    assert planned("ring").digest != plan.digest == planned(name).digest


@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_take_uneven_nodes(name: str) -> None:
    topology = Topology((0, 0, 0, 1, 2))
    plan = plan_batch(BATCH, topology, SHAPE, DcpConfig(placement=name))
    plan.check()
    assert plan.score.compute_imbalance < 1.3


def test_the_cut_of_the_hypergraph_is_the_bytes_of_the_objective() -> None:
    """Connectivity minus one, counted on the hypergraph, against the objective's bytes on one node."""
    solution = solve(BATCH, Topology.grid(1, 4), SHAPE, DcpConfig(placement="zigzag"))
    graph = make_hypergraph(solution.problem)
    placement = solution.placement
    part = np.concatenate([placement.block_device, solution.problem.unit_device(placement).ravel()])
    spans = zip(graph.ptr[:-1], graph.ptr[1:], strict=True)
    cut = sum(
        w * (len(np.unique(part[graph.pins[a:b]])) - 1) for (a, b), w in zip(spans, graph.net_weight, strict=True)
    )
    score = evaluate(solution.problem, placement)
    sent = sum(p.inter_node + p.intra_node for name, p in score.passes.items() if name != "backward_keep")
    assert cut == sent


def test_head_groups_that_do_not_fit_the_scheme_are_refused() -> None:
    with pytest.raises(ValueError, match="head_groups"):
        planned("head-ring", head_groups=1)
