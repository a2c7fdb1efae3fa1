"""Owners of token blocks for tiles that are already placed: where most bytes are saved and there is room."""

from __future__ import annotations

import numba as nb
import numpy as np

from hf_dcp.planning.placement.state import Graph


def assign_owners(graph: Graph, unit: np.ndarray, owner: np.ndarray, node: np.ndarray | None = None) -> np.ndarray:
    """
    Args:
        unit: int32[tiles, groups], the device of every unit.
        owner: int32[blocks], the owner where that is settled, -1 elsewhere.
        node: int32[blocks], the node that each block has to be on as long as that has room; None: any.

    Returns:
        int32[blocks], all settled.
    """
    free = np.full(len(owner), -1, np.int32) if node is None else node.astype(np.int32)
    benefit = _benefits(graph, unit.astype(np.int32))
    return _assign(graph, benefit, owner.astype(np.int32), free)


@nb.njit(cache=True)
def _benefits(graph, unit):
    """float64[blocks, devices]: cost that a device saves as owner, against a device that uses no row of the block."""
    groups, devices = unit.shape[1], len(graph.node)
    nodes = graph.node.max() + 1
    benefit = np.zeros((len(graph.block_size), devices))
    on_node = np.zeros(nodes, np.int64)
    on_device = np.zeros(devices, np.int64)
    stamp = 0
    for atom in range(len(graph.atom_block)):
        block = graph.atom_block[atom]
        for g in range(groups):
            stamp += 1
            for p in range(graph.atom_ptr[atom], graph.atom_ptr[atom + 1]):
                device = unit[graph.atom_tile[p], g]
                if on_device[device] == stamp:
                    continue
                on_device[device] = stamp
                benefit[block, device] += graph.device_cost[atom]
                here = graph.node[device]
                if on_node[here] != stamp:
                    on_node[here] = stamp
                    for other in range(devices):
                        if graph.node[other] == here:
                            benefit[block, other] += graph.node_cost[atom]
    return benefit


@nb.njit(cache=True)
def _assign(graph, benefit, owner, node):
    """Blocks with most to lose choose first."""
    blocks, devices = benefit.shape
    tokens = np.zeros(devices, np.int64)
    regret = np.empty(blocks)
    for block in range(blocks):
        if owner[block] >= 0:
            tokens[owner[block]] += graph.block_size[block]
        best, second = -1.0, -1.0
        for device in range(devices):
            if node[block] < 0 or graph.node[device] == node[block]:
                if benefit[block, device] > best:
                    best, second = benefit[block, device], best
                elif benefit[block, device] > second:
                    second = benefit[block, device]
        regret[block] = max(best, 0.0) - max(second, 0.0) + 1e-6 * graph.block_size[block]
    for block in np.argsort(-regret, kind="mergesort"):
        if owner[block] >= 0:
            continue
        chosen, least, inside = -1, 0, False
        for device in range(devices):
            if tokens[device] < tokens[least]:
                least = device
            if tokens[device] + graph.block_size[block] > graph.token_limit[device]:
                continue
            wanted = node[block] < 0 or graph.node[device] == node[block]
            if wanted != inside:
                if wanted:
                    chosen, inside = device, True
                continue
            if chosen < 0 or _better(benefit, tokens, block, device, chosen):
                chosen = device
        if chosen < 0:
            chosen = least
        owner[block] = chosen
        tokens[chosen] += graph.block_size[block]
    return owner


@nb.njit(cache=True)
def _better(benefit, tokens, block, device, chosen):
    if benefit[block, device] != benefit[block, chosen]:
        return benefit[block, device] > benefit[block, chosen]
    return tokens[device] < tokens[chosen]
