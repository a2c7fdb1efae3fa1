"""Draws how one batch is placed, from a real plan. Run: python docs/figures/one_batch.py"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from hf_dcp.config import DcpConfig
from hf_dcp.masks import lambda_mask
from hf_dcp.planning import BatchSpec, ModelShape, Plan, Topology, plan_batch

LENGTHS = (1536, 640, 384, 256, 128, 96)
COLOURS = ["#4C72B0", "#8DB0DD", "#C44E52", "#EBA1A4"]
"""Devices of one node share a hue."""


def example_plan() -> Plan:
    """Six sequences on two nodes with two devices each; the longest has a sink and a window, the others are causal."""
    from hf_dcp.masks import causal

    masks = [lambda_mask(64, 512)] + [causal()] * (len(LENGTHS) - 1)
    shape = ModelShape(heads=4, kv_heads=1, head_dim=64)
    return plan_batch(BatchSpec(LENGTHS, masks), Topology.grid(2, 2), shape, DcpConfig(block_size=64))


def draw(plan: Plan, file: Path) -> None:
    """One panel per sequence: the attention matrix coloured by the device that computes, the strips by the owner."""
    lengths = plan.batch.lengths
    figure, axes = plt.subplots(1, len(lengths), figsize=(13, 5.4), width_ratios=[n + 160 for n in lengths])
    for sequence, axis in enumerate(axes):
        image = device_image(plan, sequence)
        owner = token_owners(plan, sequence)
        length, strip = lengths[sequence], 36
        canvas = np.full((length + 2 * strip, length + 2 * strip), np.nan)
        canvas[2 * strip :, 2 * strip :] = image
        canvas[:strip, 2 * strip :] = owner
        canvas[2 * strip :, :strip] = owner[:, None]
        axis.imshow(canvas, cmap=ListedColormap(COLOURS), vmin=-0.5, vmax=3.5, interpolation="nearest")
        axis.set_title(f"{length}", fontsize=9)
        axis.axis("off")
    figure.legend(
        handles=[Patch(color=c, label=f"node {i // 2}, device {i}") for i, c in enumerate(COLOURS)],
        loc="lower center",
        ncol=4,
        frameon=False,
    )
    figure.suptitle("One batch placed: who owns the tokens (strips), who computes which part of attention")
    figure.savefig(file, dpi=130, bbox_inches="tight")


def device_image(plan: Plan, sequence: int) -> np.ndarray:
    """[L, L]: the device that computes each attended element of a sequence, NaN elsewhere."""
    length, start = plan.batch.lengths[sequence], int(plan.batch.starts[sequence])
    image = np.full((length, length), np.nan)
    blocks, tiles = plan.blocks, plan.tiles[0]
    for q, kv, device in zip(tiles.q, tiles.kv, plan.placement.tile_device[0][:, 0], strict=True):
        if blocks.sequence[q] == sequence:
            rows = slice(blocks.start[q] - start, blocks.start[q] - start + blocks.size[q])
            columns = slice(blocks.start[kv] - start, blocks.start[kv] - start + blocks.size[kv])
            image[rows, columns] = device
    key, attended = np.arange(length), np.zeros((length, length), bool)
    for lo, hi in plan.batch.masks[sequence].ranges(length).transpose(1, 2, 0):
        attended |= (lo[:, None] <= key) & (key < hi[:, None])
    image[~attended] = np.nan
    return image


def token_owners(plan: Plan, sequence: int) -> np.ndarray:
    """[L]: the device that owns each token of a sequence."""
    mine = plan.blocks.sequence == sequence
    return np.repeat(plan.placement.block_device[mine], plan.blocks.size[mine])


if __name__ == "__main__":
    plan = example_plan()
    plan.check()
    draw(plan, Path(__file__).parents[1] / "images" / "one_batch.png")
