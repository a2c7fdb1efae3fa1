"""Hops: through which device of a foreign node a row arrives, and its partial results leave."""

from __future__ import annotations

import numba as nb
import numpy as np


@nb.njit(cache=True)
def choose_gateways(
    net: np.ndarray, device: np.ndarray, owner: np.ndarray, weight: np.ndarray, node: np.ndarray, world: int
) -> np.ndarray:
    """The device that each user of a row receives it from.

    In a foreign node one user of the row is the gateway: it receives from the owner and passes on. Of the users the one
    with the least relayed traffic so far is taken, the lowest rank on ties.

    Args:
        net: int64[uses], the row (or run of rows with the same users) that is used; ascending.
        device: int32[uses], a device that uses it, not its owner; ascending within a net.
        owner: int32[nets], the device that owns the rows.
        weight: int64[nets], bytes of the rows.
        node: int32[world], the node of each device.

    Returns:
        int32[uses]: the owner for devices of its node and for gateways, else the gateway of the device's node.
    """
    source = np.empty(len(net), np.int32)
    load = np.zeros(world, np.int64)
    begin = 0
    while begin < len(net):
        end = begin
        while end < len(net) and net[end] == net[begin]:
            end += 1
        home = owner[net[begin]]
        for e in range(begin, end):
            source[e] = -1
        for e in range(begin, end):
            if source[e] >= 0:
                continue
            here = node[device[e]]
            if here == node[home]:
                source[e] = home
                continue
            gateway, users = -1, 0
            for f in range(e, end):
                if node[device[f]] == here:
                    users += 1
                    if gateway < 0 or load[device[f]] < load[gateway]:
                        gateway = device[f]
            for f in range(e, end):
                if node[device[f]] == here:
                    source[f] = home if device[f] == gateway else gateway
            load[gateway] += weight[net[begin]] * users
        begin = end
    return source
