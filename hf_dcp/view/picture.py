"""A scene as an image: one panel per sequence, the bytes as a matrix, and the timeline. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hf_dcp.view.scene import PassView, Scene

PANELS = 8
"""The longest sequences that are drawn."""
STRIP = 0.045
"""Of a sequence's length: who owns its tokens, beside the matrix."""


def draw(scene: Scene, file: Path, group: int = 0) -> None:
    """Write ``file``; its ending chooses the format (png, svg, pdf).

    Raises:
        ValueError: if matplotlib is not installed, or the file can't be written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError('pictures need matplotlib: pip install "hf-dcp[view]"') from error
    longest = sorted(range(len(scene.sequences)), key=lambda s: -scene.sequences[s].length)[:PANELS]
    with rc_context({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "hf_dcp"}):
        figure = Figure(figsize=(13, 8.4), layout="constrained")
        halves: Any = figure.subfigures(2, 1, height_ratios=(1.1, 1))
        upper, lower = halves
        columns = min(4, len(longest))
        panels = np.ravel(upper.subplots(-(-len(longest) // columns), columns, squeeze=False))
        for axis in panels:
            axis.axis("off")
        for axis, sequence in zip(panels, longest):
            _sequence(axis, scene, sequence, group)
        matrix, timeline = lower.subplots(1, 2, width_ratios=(1, 2.2))
        _matrix(matrix, scene, figure)
        _timeline(timeline, scene, scene.passes["forward"])
        rest = len(scene.sequences) - len(longest)
        more = f" (the longest {PANELS} of {len(scene.sequences)} sequences)" if rest else ""
        more += f", head group {group + 1} of {scene.groups}" if scene.groups > 1 else ""
        figure.suptitle(
            f"{scene.tokens:,} tokens on {len(scene.nodes)} devices of {max(scene.nodes) + 1} node(s){more}"
        )
        _legend(upper, scene)
        try:
            figure.savefig(file, dpi=130)
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} can't be written ({error}): name a .png or .svg file") from error


def _sequence(axis: Any, scene: Scene, sequence: int, group: int) -> None:
    """The attention matrix, queries downwards, with strips of owners above and beside it."""
    from matplotlib.collections import PolyCollection

    length = scene.sequences[sequence].length
    corners, colours = [], []
    for tile in scene.tiles:
        if tile.sequence == sequence and tile.group == group:
            for q, k in tile_outlines(tile):
                corners.append(np.stack([k, q], 1))
                colours.append(scene.colours[tile.device])
    strip = max(STRIP * length, 0.5)
    for begin, count, owner in scene.sequences[sequence].owners:
        for box in ((begin, -2 * strip, count, strip), (-2 * strip, begin, strip, count)):
            corners.append(_box(*box))
            colours.append(scene.colours[owner])
    axis.add_collection(PolyCollection(corners, facecolors=colours, edgecolors=colours, linewidths=0.3))
    axis.set_xlim(-2 * strip, length)
    axis.set_ylim(length, -2 * strip)
    axis.set_aspect("equal")
    axis.set_title(f"{length:,} tokens", fontsize=9)


def tile_outlines(tile: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """(q, k) of the corners of everything that a tile attends to."""
    if not tile.polygons:
        box = _box(tile.k, tile.q, tile.k_count, tile.q_count)
        return [(box[:, 1], box[:, 0])]
    return [(np.array(p[::2]), np.array(p[1::2])) for p in tile.polygons]


def _box(x: float, y: float, width: float, height: float) -> np.ndarray:
    return np.array([(x, y), (x + width, y), (x + width, y + height), (x, y + height)], float)


def _matrix(axis: Any, scene: Scene, figure: Any) -> None:
    sent = np.array(scene.passes["forward"].bytes) / 1e6
    image = axis.imshow(np.where(sent > 0, sent, np.nan), cmap="cividis_r", vmin=0)
    axis.set_title("MB sent in forward of one layer")
    _whole_numbers(axis.xaxis, axis.yaxis)
    axis.set_xlabel("to device")
    axis.set_ylabel("from device")
    for edge in np.flatnonzero(np.diff(scene.nodes)) + 0.5:
        axis.axhline(edge, color="0.6", linewidth=0.8)
        axis.axvline(edge, color="0.6", linewidth=0.8)
    figure.colorbar(image, ax=axis, shrink=0.8)


def _timeline(axis: Any, scene: Scene, one: PassView) -> None:
    scale, unit = (1e3, "ms") if one.seconds >= 1e-3 else (1e6, "µs")
    for device, kind, number, begin, end in one.spans:
        attend = kind == "attend"
        colour = scene.colours[device] if attend else "0.9"
        axis.barh(device, (end - begin) * scale, left=begin * scale, height=0.7, color=colour, edgecolor="white")
        if attend and len(scene.nodes) <= 16 and end - begin > one.seconds / 60:
            style = {"ha": "center", "va": "center", "fontsize": 7, "color": _ink(scene.colours[device])}
            axis.text((begin + end) / 2 * scale, device, str(number + 1), **style)
    axis.set_ylim(len(scene.nodes) - 0.5, -0.5)
    _whole_numbers(axis.yaxis)
    axis.set_title("predicted forward of one layer: divisions (coloured), waiting (grey)")
    axis.set_xlabel(unit)
    axis.set_ylabel("device")
    axis.spines[["top", "right"]].set_visible(False)


def _whole_numbers(*axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.set_major_locator(MaxNLocator(integer=True))


def _ink(colour: str) -> str:
    """Black or white, whichever reads on the colour."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "black" if 299 * red + 587 * green + 114 * blue > 128_000 else "white"


def _legend(figure: Any, scene: Scene) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(color=colour, label=f"device {i}, node {node}")
        for i, (colour, node) in enumerate(zip(scene.colours, scene.nodes))
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(8, len(handles)), frameon=False, fontsize=8)
