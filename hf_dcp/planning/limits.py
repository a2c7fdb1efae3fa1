"""Balance limits: what devices and nodes may compute and hold, or the best that the pieces permit."""

from __future__ import annotations

from dataclasses import dataclass

import numba as nb
import numpy as np

from hf_dcp.config import DcpConfig
from hf_dcp.planning.batch import Topology


@dataclass(frozen=True)
class Limits:
    """Hard limits of every device (and, where `DcpConfig.epsilon_inter` is set, of every node)."""

    compute: int
    """Most work of a device: attended elements times query heads times layers."""
    tokens: int
    """Most tokens of a device."""
    node_compute: np.ndarray
    """int64[nodes]: most work of a node."""
    total_compute: int
    total_tokens: int
    possible: bool
    """Whether the limits are those of the settings. If not, the pieces are too coarse, and these are the best they permit."""

    @property
    def status(self) -> str:
        return "ok" if self.possible else "best_possible"

    def imbalances(self, world_size: int) -> dict[str, float]:
        """The limits of compute and tokens as max / mean."""
        return {
            "compute": self.compute * world_size / self.total_compute if self.total_compute else 1.0,
            "tokens": self.tokens * world_size / self.total_tokens,
        }


def limits_nodes(config: DcpConfig) -> bool:
    """Whether nodes have a compute limit of their own."""
    return config.epsilon_inter is not None or config.epsilon_intra is not None


def compute_tolerance(config: DcpConfig) -> float:
    """Allowed max / mean work of devices."""
    inter, intra = _epsilons(config)
    return (1 + inter) * (1 + intra) if limits_nodes(config) else 1 + inter


def _epsilons(config: DcpConfig) -> tuple[float, float]:
    """Between nodes, and inside them."""
    if config.epsilon == "auto":
        raise ValueError('epsilon="auto" is for plan_batch, which plans with several: write a number, such as 0.1')
    inter = config.epsilon if config.epsilon_inter is None else config.epsilon_inter
    return inter, config.epsilon if config.epsilon_intra is None else config.epsilon_intra


def find_limits(
    tile_work: np.ndarray, head_groups: int, block_size: np.ndarray, topology: Topology, config: DcpConfig
) -> Limits:
    """
    Args:
        tile_work: int64[tiles], work of a tile of one head group.
        block_size: int64[blocks], tokens.
    """
    world = topology.world_size
    total, tokens = int(tile_work.sum()) * head_groups, int(block_size.sum())
    inter, _ = _epsilons(config)
    compute = int(total / world * compute_tolerance(config))
    token_limit = int(tokens / world * (1 + config.token_tolerance))
    least_compute = lpt_bound(tile_work, head_groups, world, compute)
    least_tokens = lpt_bound(block_size, 1, world, token_limit)
    possible = least_compute <= compute and least_tokens <= token_limit
    compute, token_limit = max(compute, least_compute), max(token_limit, least_tokens)
    node_compute = np.full(topology.num_nodes, total, np.int64)
    if limits_nodes(config):
        node_compute = (np.bincount(topology.node) * (total / world) * (1 + inter)).astype(np.int64)
        dealt = deal_by_node(tile_work, head_groups, topology.node)
        load = np.bincount(dealt.ravel(), weights=np.repeat(tile_work, head_groups), minlength=world).astype(np.int64)
        least_node = np.bincount(topology.node, weights=load).astype(np.int64)
        possible &= bool(load.max() <= compute and np.all(least_node <= node_compute))
        compute, node_compute = max(compute, int(load.max())), np.maximum(node_compute, least_node)
    return Limits(compute, token_limit, node_compute, total, tokens, possible)


def lpt_bound(piece: np.ndarray, copies: int, world: int, limit: int) -> int:
    """The largest load when pieces are dealt longest first, ``copies`` of each; ``limit`` where it is clear that it isn't
    more."""
    if len(piece) == 0:
        return 0
    mean = int(piece.sum()) * copies / world
    if mean + int(piece.max()) * (1 - 1 / world) <= limit:
        return limit
    order = np.argsort(-piece, kind="stable")
    pieces = np.repeat(piece[order], copies)
    return int(np.bincount(_lpt(pieces, world), weights=pieces, minlength=world).max())


def deal_evenly(piece: np.ndarray, copies: int, world: int) -> np.ndarray:
    """Pieces dealt longest first to the device with the least so far: int32[pieces, copies]."""
    order = np.argsort(-piece, kind="stable")
    device = np.empty((len(piece), copies), np.int32)
    device[order] = _lpt(np.repeat(piece[order], copies), world).reshape(-1, copies)
    return device


def deal_by_node(piece: np.ndarray, copies: int, node: np.ndarray) -> np.ndarray:
    """Pieces dealt longest first to nodes, in proportion to their devices, then inside each: int32[pieces, copies]."""
    order = np.argsort(-piece, kind="stable")
    pieces, counts = np.repeat(piece[order], copies), np.bincount(node)
    node_of = _lpt_shares(pieces, counts)
    dealt = np.empty(len(pieces), np.int32)
    for n in range(len(counts)):
        own = np.flatnonzero(node_of == n)
        dealt[own] = np.flatnonzero(node == n)[_lpt(pieces[own], counts[n])]
    device = np.empty((len(piece), copies), np.int32)
    device[order] = dealt.reshape(-1, copies)
    return device


@nb.njit(cache=True)
def _lpt_shares(piece, share):
    """The bin of each piece, dealt in this order to where it makes the least load in relation to the share."""
    load, result = np.zeros(len(share), np.int64), np.empty(len(piece), np.int32)
    for i in range(len(piece)):
        best = 0
        for b in range(1, len(share)):
            if (load[b] + piece[i]) * share[best] < (load[best] + piece[i]) * share[b]:
                best = b
        result[i] = best
        load[best] += piece[i]
    return result


@nb.njit(cache=True)
def _lpt(piece, world):
    """The device of each piece, dealt in this order to the device with the least so far (a heap): int32[pieces]."""
    load, device = np.zeros(world, np.int64), np.arange(world, dtype=np.int32)
    result = np.empty(len(piece), np.int32)
    for i in range(len(piece)):
        result[i] = device[0]
        load[0] += piece[i]
        at = 0
        while True:
            child = 2 * at + 1
            if child >= world:
                break
            if child + 1 < world and load[child + 1] < load[child]:
                child += 1
            if load[at] <= load[child]:
                break
            load[at], load[child] = load[child], load[at]
            device[at], device[child] = device[child], device[at]
            at = child
    return result
