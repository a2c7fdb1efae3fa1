"""Lower bounds on the bytes of any placement: what no solver can go below.

A part (a device, or a node) that computes area A of one head group, from R query rows and C KV rows, has R * C >= A. It owns at
most t tokens, so at least R - t query rows and C - t KV rows come from elsewhere. Parts may share the area unevenly within
the balance limit, and head groups within a part; the convex envelope over the area of a part covers every way of sharing.
Sequences and masks only make R * C larger, so the bound holds for all of them, and is weak for many sequences and sparse masks.
"""

from __future__ import annotations

import numpy as np

from hf_dcp.planning.batch import RowBytes
from hf_dcp.planning.plan import Plan
from hf_dcp.planning.problem import side_bytes

STEPS = 400
"""Areas of a part at which the cost is evaluated."""


def forward_bounds(plan: Plan) -> tuple[int, int]:
    """Bytes that forward of any placement within the plan's limits sends, at least: (between nodes, in total)."""
    topology, shape, groups = plan.topology, plan.shape, plan.head_groups
    row = side_bytes(RowBytes.of(shape, groups, plan.config.reduce_dtype), "forward")
    per_node = np.bincount(topology.node)
    parts = [topology.world_size]
    if np.all(per_node == per_node[0]):  # uneven nodes have no common mean
        parts.append(topology.num_nodes)
    tokens, bounds = plan.batch.num_tokens, [0.0, 0.0]
    for tiles, (_, layers) in zip(plan.tiles, shape.windows, strict=True):
        for i, count in enumerate(parts):
            mean, owned = float(tiles.area.sum()) / count, tokens / count * plan.score.limits["tokens"]
            areas = np.linspace(0.0, mean * groups * plan.score.limits["compute"], STEPS)
            cost = np.array([_group_cost(area, min(owned, tokens), tokens, row) for area in areas])
            bounds[i] += layers * count * groups * float(np.interp(mean, areas, _envelope(areas, cost)))
    return int(bounds[1]), int(max(bounds))


def _group_cost(area: float, owned: float, tokens: int, row: tuple[int, int]) -> float:
    if area <= owned * owned:
        return 0.0
    rows = np.linspace(area / tokens, tokens, 2000)
    columns = area / rows
    return float((row[0] * np.maximum(rows - owned, 0) + row[1] * np.maximum(columns - owned, 0)).min())


def _envelope(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The largest convex function below the points (x, y), at x: the lower hull, by Andrew's monotone chain."""
    hull: list[int] = []
    for i in range(len(x)):
        while len(hull) > 1 and (y[hull[-1]] - y[hull[-2]]) * (x[i] - x[hull[-2]]) >= (y[i] - y[hull[-2]]) * (
            x[hull[-1]] - x[hull[-2]]
        ):
            hull.pop()
        hull.append(i)
    return np.interp(x, x[hull], y[hull])
