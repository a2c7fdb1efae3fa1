"""The placement problem as a hypergraph for general partitioners: the paper's formulation (section 4.2).

Vertices are token blocks and units; the rows of an atom in one head group are a net that connects its block with the units
that read it, and costs its bytes times (parts - 1). Nodes come first, then the devices of each. Partitioners know one weight
per vertex: here the mean of the shares in compute and in tokens; both limits are kept by the refinement that follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hf_dcp.planning.placement.seeds import Seed
from hf_dcp.planning.problem import Problem

TOTAL_WEIGHT = 2_000_000
"""Vertex weights are scaled to about this sum."""
LARGEST_NET = 1_000_000
"""Net weights are scaled to at most this."""
IMBALANCE = 0.05


@dataclass(frozen=True)
class Hypergraph:
    """Vertices 0 ... n - 1 and the nets that connect them."""

    ptr: np.ndarray
    """int64[nets + 1]: net i connects ``pins[ptr[i] : ptr[i + 1]]``."""
    pins: np.ndarray
    """int64[...]"""
    net_weight: np.ndarray
    """int64[nets]"""
    vertex_weight: np.ndarray
    """int64[vertices]"""

    def part(self, vertices: np.ndarray) -> Hypergraph:
        """The hypergraph of these vertices alone; nets with fewer than two of them are left out."""
        number = np.full(len(self.vertex_weight), -1)
        number[vertices] = np.arange(len(vertices))
        net = np.repeat(np.arange(len(self.net_weight)), np.diff(self.ptr))
        kept = number[self.pins] >= 0
        count = np.bincount(net[kept], minlength=len(self.net_weight))
        used = count > 1
        kept &= used[net]
        ptr = np.concatenate([[0], np.cumsum(count[used])])
        return Hypergraph(ptr, number[self.pins[kept]], self.net_weight[used], self.vertex_weight[vertices])


Partitioner = Callable[[Hypergraph, np.ndarray, int], np.ndarray]
"""(hypergraph, int64[parts] target weights, seed) -> int[vertices]"""


def make_hypergraph(problem: Problem) -> Hypergraph:
    """Vertices: all blocks, then all units (tile by tile, head groups innermost)."""
    groups, blocks = problem.head_groups, len(problem.blocks)
    tiles_of, atoms = problem.atom_tiles, len(problem.atom_block)
    count = np.diff(tiles_of.ptr)
    ptr = np.concatenate([[0], np.cumsum(np.repeat(count + 1, groups))])
    pins = np.empty(ptr[-1], np.int64)
    first = np.zeros(ptr[-1], bool)
    first[ptr[:-1]] = True
    pins[first] = np.repeat(problem.atom_block, groups)
    net_group = np.tile(np.arange(groups), atoms)
    units = blocks + tiles_of.member.astype(np.int64) * groups
    rows = [units[tiles_of.ptr[a] : tiles_of.ptr[a + 1]] for a in range(atoms) for _ in range(groups)]
    pins[~first] = np.concatenate(rows) + np.repeat(net_group, np.repeat(count, groups)) if rows else 0
    weight = np.repeat(problem.atom_weight, groups)
    scale = max(1.0, weight.max(initial=1) / LARGEST_NET)
    work = np.repeat(problem.tile_work, groups)
    shares = np.concatenate([problem.blocks.size / problem.blocks.size.sum(), work / max(work.sum(), 1)])
    vertex_weight = np.maximum(1, np.rint(shares * TOTAL_WEIGHT / 2)).astype(np.int64)
    return Hypergraph(ptr, pins, np.maximum(1, np.rint(weight / scale)).astype(np.int64), vertex_weight)


def partitioned(problem: Problem, partition: Partitioner, seed: int) -> Seed:
    """A placement by a general partitioner: vertices on nodes, then the vertices of each node on its devices."""
    graph, topology = make_hypergraph(problem), problem.topology
    per_node = np.bincount(topology.node)
    node = _into(graph, per_node, partition, seed)
    device = np.zeros(len(graph.vertex_weight), np.int32)
    for n in range(topology.num_nodes):
        members, devices = np.flatnonzero(node == n), np.flatnonzero(topology.node == n)
        device[members] = devices[_into(graph.part(members), np.ones(len(devices)), partition, seed)]
    blocks = len(problem.blocks)
    return device[:blocks], device[blocks:].reshape(-1, problem.head_groups)


def _into(graph: Hypergraph, share: np.ndarray, partition: Partitioner, seed: int) -> np.ndarray:
    """Parts with weights in proportion to ``share``; solvers are spared the cases that are none."""
    vertices = len(graph.vertex_weight)
    if len(share) == 1 or vertices == 0:
        return np.zeros(vertices, np.int64)
    if vertices <= len(share) or len(graph.net_weight) == 0:
        order = np.argsort(-graph.vertex_weight, kind="stable")
        part = np.empty(vertices, np.int64)
        part[order] = np.arange(vertices) % len(share)
        return part
    total = int(graph.vertex_weight.sum())
    room = (1 + IMBALANCE) * total * share / share.sum()
    return partition(graph, np.ceil(np.maximum(room, graph.vertex_weight.max())).astype(np.int64), seed)


def mtkahypar(graph: Hypergraph, room: np.ndarray, seed: int) -> np.ndarray:
    """Mt-KaHyPar with its deterministic preset, the only one that is a pure function of its input."""
    import mtkahypar as solver

    instance = solver.initialize(1)
    context = instance.context_from_preset(solver.PresetType.DETERMINISTIC)
    context.set_partitioning_parameters(len(room), IMBALANCE, solver.Objective.KM1)
    context.set_individual_target_block_weights(room.tolist())
    context.logging = False
    solver.set_seed(seed % 2**31)
    nets = [graph.pins[a:b].tolist() for a, b in zip(graph.ptr[:-1], graph.ptr[1:], strict=True)]
    hypergraph = instance.create_hypergraph(
        context, len(graph.vertex_weight), len(nets), nets, graph.vertex_weight.tolist(), graph.net_weight.tolist()
    )
    return np.array(hypergraph.partition(context).get_partition(), np.int64)


def kahypar(graph: Hypergraph, room: np.ndarray, seed: int) -> np.ndarray:
    """KaHyPar (GPL-3.0: imported only here, where it was chosen by name).

    Raises:
        ImportError: if it is not installed.
    """
    try:
        import kahypar as solver
    except ImportError as error:
        raise ImportError('placement="kahypar" needs KaHyPar: pip install kahypar, or choose mtkahypar') from error
    vertices, nets, parts = len(graph.vertex_weight), len(graph.net_weight), len(room)
    hypergraph = solver.Hypergraph(
        vertices,
        nets,
        graph.ptr.tolist(),
        graph.pins.tolist(),
        parts,
        graph.net_weight.tolist(),
        graph.vertex_weight.tolist(),
    )
    context = solver.Context()
    context.loadINIconfiguration(str(Path(__file__).with_name("kahypar.ini")))
    context.setK(parts)
    context.setEpsilon(IMBALANCE)
    context.setCustomTargetBlockWeights(room.tolist())
    context.setSeed(seed % 2**31)
    context.suppressOutput(True)
    solver.partition(hypergraph, context)
    return np.array([hypergraph.blockID(v) for v in range(vertices)], np.int64)


PARTITIONERS: dict[str, Partitioner] = {"mtkahypar": mtkahypar, "kahypar": kahypar}
