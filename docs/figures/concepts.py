"""Draws the figures of the concept guide, all from real plans. Run: python docs/figures/concepts.py"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hf_dcp.config import DcpConfig
from hf_dcp.masks import causal, parse_mask
from hf_dcp.planning import BatchSpec, ModelShape, Topology, plan_batch
from hf_dcp.planning.plan import RankPlan
from hf_dcp.planning.simulate import Rates
from hf_dcp.planning.static import plan_static
from hf_dcp.planning.tiles import make_blocks, make_tiles
from hf_dcp.view.scene import Scene, make_scene

IMAGES = Path(__file__).parents[1] / "images"
MASKS = ("causal", "lambda:64,192", "blockwise:64,2,1,1", "shared:0.2x4")
LENGTHS = (16384, 9000, 4096, 2500, 1500, 800, 300)
SHAPE = ModelShape(heads=8, kv_heads=2, head_dim=128)
RATES = Rates(device_flops=150e12, inter_bytes=5e9, intra_bytes=200e9)
"""Of the timelines: a fast device on slow links, so that both can be seen."""
BLUE, ORANGE, PALE = "#0072b2", "#d55e00", "#cfe3f1"


def tiles(file: Path, length: int = 640, block: int = 64) -> None:
    """The tiles of one sequence under four masks: whole, partly masked, or none."""
    figure = Figure(figsize=(11, 3.3), layout="constrained")
    for axis, mask in zip(figure.subplots(1, len(MASKS)), MASKS):
        batch = BatchSpec([length], parse_mask(mask))
        found = make_tiles(batch, make_blocks(batch, [block]))
        attended = dense(mask, length)
        whole, partial = [], []
        for q, k in zip(found.q, found.kv):
            inside = attended[q * block : (q + 1) * block, k * block : (k + 1) * block]
            (whole if inside.all() else partial).append(Rectangle((k * block, q * block), block, block))
        for patches, colour in ((whole, BLUE), (partial, ORANGE)):
            axis.add_collection(PatchCollection(patches, facecolor=colour, edgecolor="white", linewidth=0.8))
        cells = (length // block) ** 2
        axis.set_title(f"{mask}: {len(found.q)} of {cells} tiles", fontsize=9)
        axis.set_xlim(0, length)
        axis.set_ylim(length, 0)
        axis.set_aspect("equal")
        axis.set_xticks([])
        axis.set_yticks([])
        axis.set_facecolor("#f2f4f6")
    figure.suptitle(
        "blue: attended to everywhere; orange: partly masked; grey: not computed, nothing travels", fontsize=9
    )
    figure.savefig(file, dpi=130, bbox_inches="tight")


def dense(mask: str, length: int) -> np.ndarray:
    """bool[length, length]: who attends to whom."""
    key, attended = np.arange(length), np.zeros((length, length), bool)
    for lo, hi in parse_mask(mask).ranges(length).transpose(1, 2, 0):
        attended |= (lo[:, None] <= key) & (key < hi[:, None])
    return attended


def contestants() -> dict[str, Sequence[RankPlan]]:
    """One batch under a static scheme as published, the same placement with only the rows that are read, and DCP."""
    batch, topology = BatchSpec(LENGTHS, causal()), Topology.grid(2, 4)
    return {
        "zigzag ring, as published": plan_static("zigzag", batch, topology, SHAPE).rank_plans,
        "the same, only rows that are read": plan_batch(
            batch, topology, SHAPE, DcpConfig(placement="zigzag")
        ).rank_plans,
        "DCP": plan_batch(batch, topology, SHAPE).rank_plans,
    }


def moved(scenes: dict[str, Scene], file: Path) -> None:
    """Bytes between devices under three plans of one batch."""
    figure = Figure(figsize=(11, 3.7), layout="constrained")
    axes = figure.subplots(1, len(scenes))
    matrices = [np.array(scene.passes["forward"].bytes) / 1e6 for scene in scenes.values()]
    most = max(matrix.max() for matrix in matrices)
    for axis, (name, scene), matrix in zip(axes, scenes.items(), matrices):
        image = axis.imshow(np.where(matrix > 0, matrix, np.nan), cmap="cividis_r", vmin=0, vmax=most)
        foreign = np.not_equal.outer(scene.nodes, scene.nodes)
        axis.set_title(
            f"{name}\n{matrix[foreign].sum():,.0f} MB between nodes, {matrix.sum():,.0f} MB in all", fontsize=9
        )
        axis.axhline(3.5, color="0.6", linewidth=0.8)
        axis.axvline(3.5, color="0.6", linewidth=0.8)
        axis.set_xlabel("to device")
    axes[0].set_ylabel("from device")
    figure.colorbar(image, ax=axes, shrink=0.85, label="MB")
    figure.savefig(file, dpi=130, bbox_inches="tight")


def timelines(scenes: dict[str, Scene], file: Path) -> None:
    """When each device computes and waits, under the same three plans."""
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    for axis, (name, scene) in zip(figure.subplots(len(scenes), 1, sharex=True), scenes.items()):
        _timeline(axis, scene)
        axis.set_title(f"{name}: {scene.passes['forward'].seconds * 1e3:.1f} ms", fontsize=9, loc="left")
    axis.set_xlabel("ms, predicted; coloured: divisions of attention, grey: waiting for an exchange")
    figure.savefig(file, dpi=130, bbox_inches="tight")


def _timeline(axis: Any, scene: Scene) -> None:
    for device, kind, _, begin, end in scene.passes["forward"].spans:
        colour = scene.colours[device] if kind == "attend" else "0.9"
        axis.barh(device, (end - begin) * 1e3, left=begin * 1e3, height=0.75, color=colour, edgecolor="white")
    axis.set_ylim(len(scene.nodes) - 0.5, -0.5)
    axis.set_ylabel("device")
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    tiles(IMAGES / "tiles.png")
    scenes = {name: make_scene(plans, RATES) for name, plans in contestants().items()}
    moved(scenes, IMAGES / "moved.png")
    timelines(scenes, IMAGES / "timelines.png")


if __name__ == "__main__":
    main()
