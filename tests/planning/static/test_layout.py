"""Rings and chunks of the static schemes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dcp.masks import causal, full
from hf_dcp.planning.batch import BatchSpec, Topology
from hf_dcp.planning.static.layout import SCHEMES, Grid, cut, find_scheme, pad_batch
from tests.planning.strategies import batches, dense_mask, topologies


@given(st.sampled_from(list(SCHEMES)), topologies, st.sampled_from([1, 2, 3, 4, 6]))
def test_every_row_visits_every_position_once(name: str, topology: Topology, kv_heads: int) -> None:
    grid = Grid.of(SCHEMES[name], topology, kv_heads)
    assert sorted(grid.ranks.ravel().tolist()) == list(range(topology.world_size))
    home = np.arange(grid.positions)
    visited = np.stack([grid.walk(home, step) for step in range(grid.positions)], 1)
    assert (visited[:, 0] == home).all() and (grid.walk(home, grid.positions) == home).all()
    assert (np.sort(visited, 1) == home).all()  # a row visits all positions
    assert (np.sort(visited, 0) == home[:, None]).all()  # in a step every position has one row
    hops = list(grid.hops())
    assert [target for _, target in hops] == list(range(1, grid.positions))
    assert all(source < target for source, target in hops)
    assert len(list(grid.return_hops())) == (grid.positions if grid.positions > 1 else 0)


def test_a_double_ring_leaves_its_node_only_between_inner_rings() -> None:
    topology = Topology.grid(4, 8)
    grid = Grid.of(SCHEMES["loongtrain"], topology, 2)
    assert (grid.positions, grid.team, grid.inner, grid.outer) == (16, 2, 4, 4)
    for source, target in grid.hops():
        ends = [grid.walk(np.arange(16), step) for step in (source, target)]
        nodes = [topology.node[grid.ranks[end, 0]] for end in ends]
        leaves = nodes[0] != nodes[1]
        assert leaves.all() == leaves.any() == (target % 4 == 0)


@pytest.mark.parametrize(
    ("topology", "kv_heads", "team"),
    [
        (Topology.grid(4, 8), 2, 2),
        (Topology.grid(4, 8), 8, 8),
        (Topology.grid(4, 2), 8, 2),  # a larger team would leave the node
        (Topology.grid(4, 1), 2, 2),  # none fits in a node
        (Topology.grid(4, 1), 1, 1),
        (Topology.grid(3, 1), 2, 1),
        (Topology.grid(3, 2), 6, 2),
    ],
)
def test_team(topology: Topology, kv_heads: int, team: int) -> None:
    assert Grid.of(SCHEMES["head-ring"], topology, kv_heads).team == team
    assert Grid.of(SCHEMES["zigzag"], topology, kv_heads).team == 1


def test_teams_share_a_node_also_where_ranks_are_dealt_out() -> None:
    grid = Grid.of(SCHEMES["head-ring"], Topology((0, 1, 0, 1)), 2)
    assert grid.ranks.tolist() == [[0, 2], [1, 3]]


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="team must be one of"):
        Grid.of(SCHEMES["head-ring"], Topology.grid(1, 4), 2, team=4)
    with pytest.raises(ValueError, match="team must be one of"):
        Grid.of(SCHEMES["zigzag"], Topology.grid(1, 4), 2, team=2)
    with pytest.raises(ValueError, match="one of ring, zigzag"):
        find_scheme("dcp")


@settings(max_examples=40)
@given(batches(), st.sampled_from(list(SCHEMES)), st.integers(1, 4))
def test_padding_leaves_attention_as_it_is(batch: BatchSpec, name: str, world: int) -> None:
    scheme = SCHEMES[name]
    padded = pad_batch(batch, scheme, world)
    size = 2 * world if scheme.zigzag else world
    assert all(length % size == 0 for length in padded.lengths)
    real = np.concatenate(
        [np.arange(start, start + length) for start, length in zip(padded.starts, batch.lengths, strict=False)]
    )
    mask = dense_mask(padded)
    assert np.array_equal(mask[np.ix_(real, real)], dense_mask(batch))
    assert mask.sum() == dense_mask(batch).sum()


def test_chunks() -> None:
    topology = Topology.grid(1, 2)
    batch = BatchSpec([8, 4], [causal(), full()])
    for name, owners in (("ring", [0, 1, 0, 1]), ("zigzag", [0, 1, 1, 0, 0, 1, 1, 0])):
        scheme = SCHEMES[name]
        _, owner = cut(batch, scheme, Grid.of(scheme, topology, 1))
        assert owner.tolist() == owners
    blocks, owner = cut(BatchSpec([3], causal()), SCHEMES["zigzag"], Grid.of(SCHEMES["zigzag"], topology, 1))
    assert blocks.size.tolist() == [1, 1, 1]
    assert len(owner) == 3
