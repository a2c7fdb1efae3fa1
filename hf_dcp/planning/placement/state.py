"""A placement while it is searched: who uses every net, how loaded every device is, and what a move changes.

Compiled functions take the two named tuples of arrays: `Graph`, which a search never changes, and `State`.
"""

from __future__ import annotations

from typing import NamedTuple

import numba as nb
import numpy as np

from hf_dcp.planning.problem import Problem

TIGHTER_COMPUTE, TIGHTER_TOKENS = 0.998, 0.9985
"""Searches keep this far inside the limits: what ends a little above its own limit is still within the real one."""


class Graph(NamedTuple):
    """The problem as arrays; see `Problem` for shapes."""

    tile_ptr: np.ndarray
    tile_atom: np.ndarray
    atom_ptr: np.ndarray
    atom_tile: np.ndarray
    atom_block: np.ndarray
    block_ptr: np.ndarray
    block_atom: np.ndarray
    row_ptr: np.ndarray
    row_tile: np.ndarray
    tile_work: np.ndarray
    block_size: np.ndarray
    device_cost: np.ndarray
    """float64[atoms]: cost of one more device that uses a net."""
    node_cost: np.ndarray
    """float64[atoms]: cost of one more node, on top."""
    node: np.ndarray
    """int32[devices]"""
    compute_limit: np.ndarray
    """int64[devices]"""
    token_limit: np.ndarray
    """int64[devices]"""
    node_limit: np.ndarray
    """int64[nodes]"""
    compute_penalty: float
    """Cost of one unit of work above the limit."""
    token_penalty: float


class State(NamedTuple):
    """One placement, with counts that moves keep up to date."""

    unit: np.ndarray
    """int32[tiles, groups]: device of every unit."""
    owner: np.ndarray
    """int32[blocks]"""
    on_device: np.ndarray
    """int16 or int32[nets, devices]: units of the net there, plus one at the owner."""
    on_node: np.ndarray
    """int32[nets, nodes]: the same."""
    work: np.ndarray
    """int64[devices]"""
    tokens: np.ndarray
    """int64[devices]"""
    node_work: np.ndarray
    """int64[nodes]"""


def make_graph(problem: Problem, penalty: float = 4.0) -> Graph:
    """
    Args:
        penalty: what moving a device's whole excess elsewhere may cost, relative to the bytes of a typical device.
    """
    topology, limits = problem.topology, problem.limits
    weight = problem.atom_weight.astype(np.float64)
    # Typical cost: every row on two more devices. A device's mean work above its limit costs as much as its share.
    typical = 2.0 * float(weight.sum()) * problem.head_groups * topology.intra_cost / problem.world_size
    mean_work = max(1.0, limits.total_compute / problem.world_size)
    mean_tokens = limits.total_tokens / problem.world_size
    return Graph(
        tile_ptr=problem.tile_atoms.ptr,
        tile_atom=problem.tile_atoms.member,
        atom_ptr=problem.atom_tiles.ptr,
        atom_tile=problem.atom_tiles.member,
        atom_block=problem.atom_block,
        block_ptr=problem.block_atoms.ptr,
        block_atom=problem.block_atoms.member,
        row_ptr=problem.block_tiles.ptr,
        row_tile=problem.block_tiles.member,
        tile_work=problem.tile_work,
        block_size=problem.blocks.size,
        device_cost=weight * topology.intra_cost,
        node_cost=weight * (topology.inter_cost - topology.intra_cost),
        node=topology.node,
        compute_limit=np.full(problem.world_size, _tighter(limits.compute, TIGHTER_COMPUTE, limits.possible)),
        token_limit=np.full(problem.world_size, _tighter(limits.tokens, TIGHTER_TOKENS, limits.possible)),
        node_limit=limits.node_compute,
        compute_penalty=penalty * typical * 5 / mean_work,
        token_penalty=penalty * typical * 5 / mean_tokens,
    )


def node_graph(graph: Graph) -> Graph:
    """The same problem with nodes for devices: what happens inside a node is free."""
    devices = np.bincount(graph.node)
    return graph._replace(
        device_cost=graph.device_cost + graph.node_cost,
        node_cost=np.zeros_like(graph.node_cost),
        node=np.arange(len(devices), dtype=np.int32),
        compute_limit=np.minimum(graph.compute_limit[0] * devices, graph.node_limit),
        token_limit=graph.token_limit[0] * devices,
    )


def _tighter(limit: int, factor: float, possible: bool) -> int:
    return limit - int(limit * (1 - factor)) if possible else limit  # small limits stay as they are


def make_state(graph: Graph, owner: np.ndarray, unit: np.ndarray) -> State:
    """
    Args:
        owner: int32[blocks].
        unit: int32[tiles, groups].
    """
    nets, devices, nodes = len(graph.atom_block) * unit.shape[1], len(graph.node), int(graph.node.max()) + 1
    largest = int(np.diff(graph.atom_ptr).max(initial=0)) + 1
    dtype = np.int16 if largest <= np.iinfo(np.int16).max else np.int32  # small tables stay in the nearest cache
    state = State(
        unit=unit.astype(np.int32),
        owner=owner.astype(np.int32),
        on_device=np.zeros((nets, devices), dtype),
        on_node=np.zeros((nets, nodes), dtype),
        work=np.zeros(devices, np.int64),
        tokens=np.zeros(devices, np.int64),
        node_work=np.zeros(nodes, np.int64),
    )
    _count(graph, state)
    return state


@nb.njit(cache=True)
def _count(graph, state):
    groups = state.unit.shape[1]
    for atom in range(len(graph.atom_block)):
        device = state.owner[graph.atom_block[atom]]
        for net in range(atom * groups, (atom + 1) * groups):
            state.on_device[net, device] += 1
            state.on_node[net, graph.node[device]] += 1
    for block in range(len(state.owner)):
        state.tokens[state.owner[block]] += graph.block_size[block]
    for tile in range(len(graph.tile_work)):
        for g in range(groups):
            device = state.unit[tile, g]
            state.work[device] += graph.tile_work[tile]
            state.node_work[graph.node[device]] += graph.tile_work[tile]
            for p in range(graph.tile_ptr[tile], graph.tile_ptr[tile + 1]):
                net = graph.tile_atom[p] * groups + g
                state.on_device[net, device] += 1
                state.on_node[net, graph.node[device]] += 1


@nb.njit(cache=True)
def cost_of(graph, state):
    """The cost without penalties."""
    total, groups = 0.0, state.unit.shape[1]
    for net in range(len(state.on_device)):
        devices, nodes = -1, -1
        for device in range(state.on_device.shape[1]):
            devices += state.on_device[net, device] > 0
        for node in range(state.on_node.shape[1]):
            nodes += state.on_node[net, node] > 0
        total += devices * graph.device_cost[net // groups] + nodes * graph.node_cost[net // groups]
    return total


def within_limits(problem: Problem, state: State) -> bool:
    """Whether a placement is within the limits proper, not only those that the search keeps."""
    limits = problem.limits
    return bool(
        state.work.max() <= limits.compute
        and state.tokens.max() <= limits.tokens
        and np.all(state.node_work <= limits.node_compute)
    )


@nb.njit(cache=True)
def penalty_of(graph, state):
    """What the placement's excess over the limits costs."""
    total = 0.0
    for device in range(len(state.work)):
        total += graph.compute_penalty * max(0, state.work[device] - graph.compute_limit[device])
        total += graph.token_penalty * max(0, state.tokens[device] - graph.token_limit[device])
    for node in range(len(state.node_work)):
        total += graph.compute_penalty * max(0, state.node_work[node] - graph.node_limit[node])
    return total
