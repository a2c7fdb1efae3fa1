"""Bytes and balance of a placement, exactly: the one cost by which every solver is judged."""

from __future__ import annotations

from dataclasses import dataclass

import numba as nb
import numpy as np

from hf_dcp.planning.batch import RowBytes
from hf_dcp.planning.plan import PASSES
from hf_dcp.planning.problem import Placement, Problem, costed_passes, side_bytes
from hf_dcp.planning.routing import choose_gateways

COSTED = ("forward", "backward", "backward_keep")


@dataclass(frozen=True)
class PassBytes:
    """Bytes of all ranks in one pass, every window times its layers."""

    inter_node: int
    intra_node: int
    max_device: int
    """Most bytes that one device sends and receives, relaying included."""


@dataclass(frozen=True)
class Score:
    """What a placement costs, and how even it is."""

    cost: int
    """Bytes between nodes and inside, forward and backward, each times its relative cost."""
    max_device_bytes: int
    """Of forward and backward together; decides between equal costs."""
    passes: dict[str, PassBytes]
    """For "forward", "backward" (remote rows fetched again) and "backward_keep"."""
    costed: tuple[PassBytes, ...]
    """Those that `cost` is made of."""
    compute_imbalance: float
    """Largest over mean work of all devices, idle ones too, windows weighted by their layers."""
    token_imbalance: float
    window_imbalance: tuple[float, ...]
    """Compute imbalance of each window's layers alone."""
    limits: dict[str, float]
    """The limits of "compute" and "tokens" that applied, as max / mean."""
    status: str
    """"ok": within the limits of the settings; "best_possible": those can't be met with these tiles, but the best that
    they permit is; "unbalanced": above the limits that applied (static schemes may be)."""
    excess: int
    """How far the placement is above the limits: parts per million of the mean, compute and tokens added."""

    @property
    def key(self) -> tuple[int, int, int]:
        """Smaller is better."""
        return self.excess, self.cost, self.max_device_bytes


def evaluate(problem: Problem, placement: Placement) -> Score:
    """Score a placement of ``problem``."""
    topology, groups = problem.topology, problem.head_groups
    unit_device = problem.unit_device(placement)
    owner = placement.block_device.astype(np.int32)
    row = RowBytes.of(problem.shape, groups, problem.config.reduce_dtype)
    between, total = np.zeros(2, np.int64), np.zeros(2, np.int64)  # row transfers by side, times layers
    device = np.zeros((2, topology.world_size), np.int64)
    for i in range(len(problem.atom_window) - 1):
        layers = problem.shape.windows[i // 2][1]
        atoms = slice(problem.atom_window[i], problem.atom_window[i + 1])
        rows = np.repeat(problem.atom_rows[atoms], groups)
        net_owner = np.repeat(owner[problem.atom_block[atoms]], groups)
        net, user = _remote_users(
            problem.atom_tiles.ptr[atoms.start : atoms.stop + 1], problem.atom_tiles.member, unit_device, net_owner
        )
        routed = sum(side_bytes(row, name)[i % 2] for name in PASSES)  # as rank plans route them
        source = choose_gateways(net, user, net_owner, rows * routed, topology.node, topology.world_size)
        moved = rows[net] * layers
        between[i % 2] += moved[topology.node[source] != topology.node[user]].sum()
        total[i % 2] += moved.sum()
        for end in (source, user):
            np.add.at(device[i % 2], end, moved)
    passes = {name: _pass_bytes(side_bytes(row, name), between, total, device) for name in COSTED}
    costed = [passes[name] for name in costed_passes(problem.config)]
    bytes_of = np.sum([side_bytes(row, name) for name in costed_passes(problem.config)], axis=0)
    max_device = (bytes_of @ device).max()
    return Score(
        cost=sum(p.inter_node * topology.inter_cost + p.intra_node * topology.intra_cost for p in costed),
        max_device_bytes=int(max_device),
        passes=passes,
        costed=tuple(costed),
        **_balance(problem, owner, unit_device),
    )


def _pass_bytes(row: tuple[int, int], between: np.ndarray, total: np.ndarray, device: np.ndarray) -> PassBytes:
    inter = int(between @ np.array(row))
    return PassBytes(inter, int(total @ np.array(row)) - inter, int((np.array(row) @ device).max()))


def _balance(problem: Problem, owner: np.ndarray, unit_device: np.ndarray) -> dict:
    world, limits = problem.world_size, problem.limits
    bounds = zip(problem.tile_window[:-1], problem.tile_window[1:], strict=True)
    windows = [_device_work(problem.tile_work[a:b], unit_device[a:b], world) for a, b in bounds]
    work = np.sum(windows, axis=0)
    tokens = np.bincount(owner, weights=problem.blocks.size, minlength=world).astype(np.int64)
    node_work = np.bincount(problem.topology.node, weights=work).astype(np.int64)
    over = max(int(work.max()) - limits.compute, 0) + int(np.maximum(node_work - limits.node_compute, 0).sum())
    excess = _millionths(over * world, limits.total_compute)
    excess += _millionths(max(int(tokens.max()) - limits.tokens, 0) * world, limits.total_tokens)
    return {
        "compute_imbalance": _imbalance(work),
        "token_imbalance": _imbalance(tokens),
        "window_imbalance": tuple(_imbalance(part) for part in windows),
        "limits": limits.imbalances(world),
        "status": "unbalanced" if excess else limits.status,
        "excess": excess,
    }


def _millionths(part: int, whole: int) -> int:
    return -(-part * 1_000_000 // max(whole, 1))


def _imbalance(load: np.ndarray) -> float:
    return float(load.max() * len(load) / load.sum()) if load.any() else 1.0


@nb.njit(cache=True)
def _device_work(tile_work, unit_device, world):
    """int64[world]: work of each device."""
    work = np.zeros(world, np.int64)
    for t in range(len(tile_work)):
        for g in range(unit_device.shape[1]):
            work[unit_device[t, g]] += tile_work[t]
    return work


@nb.njit(cache=True)
def _remote_users(ptr, tile, unit_device, net_owner):
    """Every (net, device other than its owner that has a tile of it), ascending; nets are (atom, group)."""
    groups = unit_device.shape[1]
    world = max(unit_device.max(), net_owner.max()) + 1 if unit_device.size > 0 else 1
    seen = np.full(world, -1, np.int64)
    nets, users = np.empty(1024, np.int64), np.empty(1024, np.int32)
    found = 0
    for net in range(len(net_owner)):
        begin = found
        seen[net_owner[net]] = net
        for p in range(ptr[net // groups], ptr[net // groups + 1]):
            device = unit_device[tile[p], net % groups]
            if seen[device] == net:
                continue
            seen[device] = net
            if found == len(nets):
                nets, users = np.append(nets, np.empty(found, np.int64)), np.append(users, np.empty(found, np.int32))
            nets[found], users[found] = net, device
            found += 1
        users[begin:found].sort()
    return nets[:found], users[:found]
