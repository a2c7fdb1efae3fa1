"""Seeds of the upper level: which node computes each tile and owns each block; what happens inside a node is free here."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hf_dcp.planning.placement.pieces import block_work, pack_pieces, segment_pieces, sequence_pieces
from hf_dcp.planning.placement.refine import refine
from hf_dcp.planning.placement.state import Graph, State, cost_of, make_state, node_graph, penalty_of
from hf_dcp.planning.placement.zigzag import nested_bands
from hf_dcp.planning.problem import Problem

EFFORT = 500_000
STARTS, KEPT = 3, 2
"""So many packings of each kind are refined, and so many of the results are kept."""
BANDS = (0.0, 0.12, 0.195)
"""How much less work than its share the innermost node gets in nested bands (see `nested_bands`)."""
ROOM = 0.98
"""Nodes are kept this far inside their limits, so that their devices can be balanced."""
SLACK = (0.03, 0.08)
"""How far above its share of tokens and of work a node may get when pieces are packed."""


class NodeSeed(NamedTuple):
    """A placement on nodes."""

    name: str
    cost: float
    penalty: float
    state: State

    @property
    def key(self) -> tuple[bool, float]:
        return self.penalty > 0.0, self.cost + self.penalty


def node_seeds(problem: Problem, graph: Graph, seed: int) -> list[NodeSeed]:
    """The best placements on nodes, the best first."""
    if problem.topology.num_nodes == 1:
        return [_on_nodes(problem, node_graph(graph), "one node", np.zeros(len(problem.blocks), np.int32))]
    if len(problem.batch.lengths) > 1:
        return sorted(_packed(problem, graph, seed), key=lambda found: found.key)[:KEPT]
    nodes = node_graph(graph)
    bands = [_on_nodes(problem, nodes, f"bands {deficit}", nested_bands(problem, deficit)) for deficit in BANDS]
    segments = _packings(problem, graph, "segments", segment_pieces(problem), seed)
    return sorted([*bands, *segments], key=lambda found: found.key)[:1]


def _packed(problem: Problem, graph: Graph, seed: int) -> list[NodeSeed]:
    """Whole sequences; and, unless they fit without a cut or have none, whole segments."""
    sequences, segments = sequence_pieces(problem), segment_pieces(problem)
    found = _packings(problem, graph, "sequences", sequences, seed)
    if found[-1].key > (False, 0.0) and not np.array_equal(sequences, segments):
        found += _packings(problem, graph, "segments", segments, seed)
    return found


def _packings(problem: Problem, graph: Graph, name: str, piece: np.ndarray, seed: int) -> list[NodeSeed]:
    """Several packings of pieces, refined; one is enough if it costs nothing."""
    full = node_graph(graph)
    roomy = full._replace(
        compute_limit=(full.compute_limit * ROOM).astype(np.int64),
        token_limit=(full.token_limit * ROOM).astype(np.int64),
    )
    room = np.bincount(problem.topology.node) / problem.world_size
    size, work = problem.blocks.size, block_work(problem)
    found: list[NodeSeed] = []
    for start in range(seed * STARTS, (seed + 1) * STARTS):
        packed = _on_nodes(problem, roomy, name, pack_pieces(piece, size, work, room, SLACK, start))
        if packed.key > (False, 0.0):
            refine(roomy, packed.state, EFFORT, start, 0.5, patience=0.5)
            packed = NodeSeed(name, cost_of(roomy, packed.state), penalty_of(roomy, packed.state), packed.state)
        found.append(packed)
        if found[-1].key == (False, 0.0):
            break
    return found


def _on_nodes(problem: Problem, nodes: Graph, name: str, block_node: np.ndarray) -> NodeSeed:
    """Every tile where its queries live."""
    state = make_state(nodes, block_node, np.repeat(block_node[problem.tile_q][:, None], problem.head_groups, 1))
    return NodeSeed(name, cost_of(nodes, state), penalty_of(nodes, state), state)
