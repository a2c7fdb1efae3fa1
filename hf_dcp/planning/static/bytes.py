"""What the static schemes send, in closed form: tokens times hops times bytes of a row."""

from __future__ import annotations

import numpy as np

from hf_dcp.planning.batch import BatchSpec, ModelShape, RowBytes, Topology
from hf_dcp.planning.static.layout import Grid, find_scheme, pad_batch

COSTED = ("forward", "backward", "backward_keep")


def dense_bytes(
    name: str,
    batch: BatchSpec,
    topology: Topology,
    shape: ModelShape,
    reduce_dtype: str | None = None,
    *,
    team: int | None = None,
    inner: int | None = None,
    executed: bool = False,
) -> dict[str, dict[str, int]]:
    """Bytes of one attention call of all ranks, padding included: mask and lengths matter only for the padding.

    Args:
        name: a key of `SCHEMES`.
        team, inner: see `Grid.of`.
        executed: what our rank plans of the scheme send, in place of what the published programs send. They differ
            where heads are split: here an lse travels with every partial O, and backward sends Q, K and V to the team
            again, with lse and delta. (Published programs keep the team's Q, K and V: only ring KV travels again.
            TransformerEngine sends O again with dO; that is not counted, as O never travels in backward under our rules.)

    Returns:
        for "forward", "backward" and "backward_keep" (the ring's KV kept too): "inter_node_bytes", "intra_node_bytes"
        and "max_device_bytes" (sent and received by one rank; all ranks send the same).
    """
    scheme = find_scheme(name)
    grid = Grid.of(scheme, topology, shape.kv_heads, team, inner)
    tokens = pad_batch(batch, scheme, topology.world_size).num_tokens
    row = RowBytes.of(shape, grid.team, reduce_dtype)
    kv, dkv, teams = _links(grid, list(grid.hops())), _links(grid, list(grid.return_hops())), _team_links(grid)
    result = {}
    for which in COSTED:
        # a link of a ring carries the rows of one position, a link of a team those of one rank
        per_position = kv * (0 if which == "backward_keep" else row.kv)
        if which != "forward":
            per_position = per_position + dkv * row.partial_kv
        per_rank = teams * (_team_executed(row, which) if executed else _team_published(row, which))
        inter, intra = (per_position * (tokens // grid.positions) + per_rank * (tokens // grid.ranks.size)).tolist()
        result[which] = {
            "inter_node_bytes": inter,
            "intra_node_bytes": intra,
            "max_device_bytes": 2 * (inter + intra) // grid.ranks.size,
        }
    return result


def _team_published(row: RowBytes, which: str) -> int:
    """Bytes of one token and group that goes to a team member and back."""
    return row.q + row.kv + row.partial_q if which == "forward" else row.q + row.partial_q + row.partial_kv


def _team_executed(row: RowBytes, which: str) -> int:
    return sum(row.inputs(which)) + sum(row.partials(which))


def _links(grid: Grid, hops: list[tuple[int, int]]) -> np.ndarray:
    """How often the rows of one position and group travel (between nodes, inside a node), over all: int64[2]."""
    home = np.arange(grid.positions)
    pairs = [[grid.ranks[grid.walk(home, step)].ravel() for step in hop] for hop in hops]
    return sum((_count(grid, a, b) for a, b in pairs), np.zeros(2, np.int64))


def _team_links(grid: Grid) -> np.ndarray:
    """How often the rows of one rank and group go to another rank of its team, in the same two classes: int64[2]."""
    shifted = [np.roll(grid.ranks, shift, 1).ravel() for shift in range(1, grid.team)]
    return sum((_count(grid, grid.ranks.ravel(), other) for other in shifted), np.zeros(2, np.int64))


def _count(grid: Grid, sender: np.ndarray, receiver: np.ndarray) -> np.ndarray:
    foreign = int((grid.node[sender] != grid.node[receiver]).sum())
    return np.array([foreign, len(sender) - foreign], np.int64)
