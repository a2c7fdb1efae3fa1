"""Whether only rows that are read travel, and by the shortest ways: the byte rules."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_dcp.planning.check.error import PlanError
from hf_dcp.planning.check.flow import Flow
from hf_dcp.planning.check.rows import Slots


def require_used(sides: Sequence[tuple[Slots, Slots]], sums: Sequence[Sequence[np.ndarray]], where: str) -> None:
    """Require every remote row to be attended to, or to attend to something, on its rank.

    Args:
        sums: by rank and side, fingerprints of what the rank's items compute; 0 for nothing.
    """
    for rank, (slots, own) in enumerate(zip(sides, sums)):
        for side in range(2):
            idle = np.flatnonzero(own[side][slots[side].own :] == 0)
            if len(idle):
                row = slots[side].describe(slots[side].own + int(idle[0]), side)
                raise PlanError(f"{where}: rank {rank} fetches {row}, but no item there needs it")


def require_hops(flow: Flow, owner: np.ndarray, node: np.ndarray) -> None:
    """Require every row to come from its owner, inside other nodes through one gateway, and partial results to go back
    the same way: as many transfers between nodes as foreign nodes use the row, as many in total as foreign ranks.

    Args:
        owner: int32[tokens]; node: int32[world_size].
    """
    for side in range(2):
        gateways = _gateways(flow, side, owner, node)
        for rank, slots in enumerate(flow.sides):
            remote = slice(slots[side].own, None)
            token, group = slots[side].token[remote], slots[side].group[remote]
            journey = flow.journeys[rank][side]
            foreign = node[owner[token]] != node[rank]
            gateway = gateways[node[rank], group, token]
            expected = np.where(foreign & (gateway != rank), gateway, owner[token])
            _require(flow, rank, side, journey.source[remote] == expected, "doesn't come the way of the byte rules")
            if side == 1 and not flow.kv_partials:
                expected = np.full(len(token), -1)
            _require(flow, rank, side, journey.target[remote] == expected, "has its result go back another way")


def _gateways(flow: Flow, side: int, owner: np.ndarray, node: np.ndarray) -> np.ndarray:
    """The rank that receives each row from outside its node: int32[nodes, groups, tokens], -1 where there is none."""
    groups = flow.sides[0][side].groups
    gateways = np.full((int(node.max()) + 1, groups, len(owner)), -1, np.int32)
    for rank, slots in enumerate(flow.sides):
        source = flow.journeys[rank][side].source
        crossing = np.flatnonzero((source >= 0) & (node[source] != node[rank]))
        token, group = slots[side].token[crossing], slots[side].group[crossing]
        direct = source[crossing] == owner[token]
        _require(flow, rank, side, direct, "crosses nodes from a rank that isn't its owner", crossing)
        again = gateways[node[rank], group, token] < 0
        _require(flow, rank, side, again, "crosses into the same node twice", crossing)
        gateways[node[rank], group, token] = rank
    return gateways


def _require(flow: Flow, rank: int, side: int, good: np.ndarray, what: str, slots: np.ndarray | None = None) -> None:
    wrong = np.flatnonzero(~good)
    if len(wrong):
        known = flow.sides[rank][side]
        slot = int(wrong[0]) + known.own if slots is None else int(slots[wrong[0]])
        raise PlanError(f"{flow.where}: rank {rank}: {known.describe(slot, side)}, {what}")
