"""Rates as compiled functions want them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hf_dcp.planning.batch import Topology
from hf_dcp.rates import Rates


class Links(NamedTuple):
    """What a pass costs besides arithmetic; entries of arrays by kind of row (`hf_dcp.planning.transfers`), 0 unused."""

    seconds: np.ndarray
    """float64[4]: per byte. A gateway's rows come over links between nodes, those of all gateways at once."""
    latency: np.ndarray
    """float64[4]"""
    launch: float
    """Seconds for each division."""
    call: float
    """Seconds for the attention call."""
    row: float
    """Seconds for each query row of a division, once for all tiles of a Q block and head group."""

    @classmethod
    def of(cls, rates: Rates, topology: Topology, row_s: float) -> Links:
        """
        Args:
            row_s: seconds for each query row of one head group, in this pass.
        """
        gateways = max(1, topology.world_size // topology.num_nodes)
        inside, between = 1 / rates.intra_bytes, 1 / rates.inter_bytes
        seconds = np.array([0.0, inside, between, inside + between / gateways])
        latency = np.array([0.0, rates.intra_latency_s, rates.latency_s, rates.latency_s + rates.intra_latency_s])
        return cls(seconds, latency, rates.launch_s, rates.call_s, row_s)
