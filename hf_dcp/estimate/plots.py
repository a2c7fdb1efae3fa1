"""Plots of an estimate, as SVG text that reads on light and on dark pages. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from hf_dcp.estimate.run import Estimate
from hf_dcp.estimate.schemes import DCP

BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#009e73"
"""Colours that differ for colour-blind readers (Okabe and Ito)."""
GREY = "#808080"


def plots(answer: Estimate) -> dict[str, str]:
    """Title -> SVG.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    return {
        "Lengths of the rows": lengths(answer),
        "Where a step's time goes": times(answer),
        "Speed-up of a step by DCP, batch by batch": speedups(answer),
        "Bytes for attention, all layers, forward and backward": moved(answer),
    }


def lengths(answer: Estimate) -> str:
    bins = answer.bins
    rows = np.array([one.rows for one in bins]) / max(sum(one.rows for one in bins), 1)
    tokens = np.array([one.tokens for one in bins]) / max(sum(one.tokens for one in bins), 1)
    with axes() as (axis, done):
        at = np.arange(len(bins))
        axis.bar(at - 0.2, 100 * rows, 0.38, color=BLUE, label="% of rows")
        axis.bar(at + 0.2, 100 * tokens, 0.38, color=ORANGE, label="% of tokens")
        axis.set_xticks(at, [f"{one.low:,}" for one in bins], rotation=40, ha="right")
        axis.set_xlabel("tokens of a row, from")
        legend(axis)
    return done[0]


def times(answer: Estimate) -> str:
    schemes = answer.schemes
    with axes() as (axis, done):
        names = list(schemes)[::-1]
        waiting = np.array([schemes[n].exposed_s for n in names]) * 1e3
        attention = np.array([schemes[n].attention_s for n in names]) * 1e3 - waiting
        other = np.array([schemes[n].step_s - schemes[n].attention_s for n in names]) * 1e3
        left = np.zeros(len(names))
        for part, colour, label in (
            (other, GREY, "all but attention"),
            (attention, BLUE, "attention"),
            (waiting, ORANGE, "waiting for exchanges"),
        ):
            axis.barh(names, part, left=left, color=colour, label=label)
            left += part
        axis.set_xlabel("ms")
        legend(axis)
    return done[0]


def speedups(answer: Estimate) -> str:
    names = [name for name in answer.schemes if name != DCP][::-1]
    ratios = [[one[name].step_s / one[DCP].step_s for one in answer.outcomes] for name in names]
    with axes() as (axis, done):
        line = {"color": GREY}
        axis.boxplot(
            ratios, orientation="horizontal", whis=(10, 90), showfliers=False, medianprops={"color": ORANGE, "linewidth": 2},
            boxprops=line, whiskerprops=line, capprops=line,
        )  # fmt: skip
        axis.set_yticks(range(1, len(names) + 1), names)
        axis.axvline(1, color=BLUE, linewidth=1)
        axis.set_xlabel("times as fast (box: half of the batches, whiskers: 10 to 90 %)")
    return done[0]


def moved(answer: Estimate) -> str:
    schemes = answer.schemes
    names = list(schemes)[::-1]
    with axes() as (axis, done):
        between = np.array([schemes[n].inter_bytes for n in names]) / 1e9
        inside = np.array([schemes[n].intra_bytes for n in names]) / 1e9
        axis.barh(names, between, color=ORANGE, label="between nodes")
        axis.barh(names, inside, left=between, color=GREEN, label="inside nodes")
        axis.set_xlabel("GB per step")
        legend(axis)
    return done[0]


def legend(axis: Any) -> None:
    axis.legend(frameon=False, labelcolor=GREY, loc="best")


@contextmanager
def axes() -> Iterator[tuple[Any, list[str]]]:
    """An axis to draw on, and a list that holds the SVG afterwards."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError('plots need matplotlib: pip install "hf-dcp[view]"') from error
    done: list[str] = []
    # the same text for the same plot, always
    settings = {"svg.fonttype": "none", "svg.hashsalt": "hf_dcp", "text.color": GREY, "font.size": 10}
    settings |= {"axes.labelcolor": GREY, "axes.edgecolor": GREY, "xtick.color": GREY, "ytick.color": GREY}
    with rc_context(settings):
        figure = Figure(figsize=(7.2, 3.4))
        FigureCanvasSVG(figure)
        axis = figure.add_subplot()
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.set_axisbelow(True)
        yield axis, done
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
    text = buffer.getvalue()
    done.append(text[text.index("<svg") :])
