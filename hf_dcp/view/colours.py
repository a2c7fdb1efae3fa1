"""One colour per device, told apart by colour-blind readers too: a hue per node, shades inside it."""

from __future__ import annotations

from collections.abc import Sequence

HUES = ("#0072b2", "#d55e00", "#cc79a7", "#f0e442", "#56b4e9", "#009e73", "#e69f00", "#7f7f7f")
"""Okabe and Ito's colours, with a grey in place of black; the first few, and their shades, are the easiest to tell apart."""


def device_colours(node_of_rank: Sequence[int]) -> list[str]:
    """``#rrggbb`` of every device. A group of up to 8 devices on one node has a hue for each device."""
    nodes = max(node_of_rank) + 1
    if nodes == 1 and len(node_of_rank) <= len(HUES):
        return list(HUES[: len(node_of_rank)])
    seen = [0] * nodes
    sizes = [list(node_of_rank).count(node) for node in range(nodes)]
    colours = []
    for node in node_of_rank:
        colours.append(shade(HUES[node % len(HUES)], seen[node], sizes[node]))
        seen[node] += 1
    return colours


def shade(colour: str, index: int, count: int) -> str:
    """The ``index``-th of ``count`` shades, from darker to lighter than the colour."""
    if count == 1:
        return colour
    mixed = -0.35 + 0.8 * index / (count - 1)  # below 0: towards black, above: towards white
    target, share = (0, -mixed) if mixed < 0 else (255, mixed)
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (target - part) * share):02x}" for part in parts)
