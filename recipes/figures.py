"""Remakes the plots of docs/analysis.md: what bytes, planning and time depend on.

    python recipes/figures.py                      # draws all, from the numbers in benchmarks/data
    python recipes/figures.py --measure epsilon    # plans anew for this plot, and draws all
    python recipes/figures.py --measure all        # about ten minutes on one core

Plots of measured attention are drawn from `benchmarks/data/cluster_results.jsonl`, which `benchmarks/cluster.py` makes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.analysis import MASKS, PASSES, STUDIES, Row, Scale
from hf_dcp.bench.planner import PARTS

ROOT = Path(__file__).resolve().parents[1]
NUMBERS, MEASURED = (
    ROOT / "benchmarks" / "data" / "analysis.json",
    ROOT / "benchmarks" / "data" / "cluster_results.jsonl",
)
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
KINDS = ("causal", "lambda", "blockwise", "shared")
CONTESTANTS = {"dcp": "DCP", "dense": "best dense", "row_exact": "best row-exact"}
BARS = ("attention_s", "exposed_exchange_s", "reduction_s", "other_s")


def panels(title: str, count: int = 4) -> tuple[Figure, list[Axes]]:
    """A row of plots under one title."""
    figure = Figure(figsize=(3.2 * count, 3.2), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def with_legend(figure: Figure) -> Figure:
    """Beside the plots: what the first of them shows."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=8, frameon=False)
    return figure


def block_size_bytes(rows: Sequence[Row]) -> Figure:
    figure, axes = panels("Bytes against block size, forward and backward")
    for axis, mask in zip(axes, MASKS):
        own = [row for row in rows if row["mask"] == mask]
        names = [str(row["block_size"]) for row in own]
        for key, colour in (("inter", COLOURS[0]), ("busiest", COLOURS[1])):
            what = "between nodes" if key == "inter" else "busiest device"
            axis.plot(names, [row[key] for row in own], "o-", color=colour, label=what)
            axis.plot(names, [row[f"zigzag_{key}"] for row in own], "--", color=colour, label=f"{what}, zigzag")
        axis.set(title=mask, xlabel="block size, tokens", yscale="symlog")
    axes[0].set_ylabel("MB")
    return with_legend(figure)


def block_size_seconds(rows: Sequence[Row]) -> Figure:
    figure, axes = panels("CPU seconds of a plan by part, against block size")
    for axis, mask in zip(axes, MASKS):
        own = [row for row in rows if row["mask"] == mask]
        names = [str(row["block_size"]) for row in own]
        below = [0.0] * len(own)
        for part, colour in zip(PARTS, COLOURS):
            axis.bar(names, [row[part] for row in own], bottom=below, color=colour, label=part)
            below = [b + row[part] for b, row in zip(below, own)]
        axis.set(title=mask, xlabel="block size, tokens")
    axes[0].set_ylabel("CPU seconds")
    return with_legend(figure)


def sparsity(rows: Sequence[Row]) -> Figure:
    figure, axes = panels("Bytes against sparsity, as shares of zigzag's", 2)
    for axis, key, title in zip(axes, ("inter", "busiest"), ("between nodes", "busiest device")):
        for kind, colour in zip(KINDS, COLOURS):
            own = [row for row in rows if row["mask"].startswith(kind)]
            values = [row[key] / max(row[f"zigzag_{key}"], 1e-9) for row in own]  # nothing on one node
            axis.plot([row["share"] for row in own], values, "o", color=colour, label=kind)
        axis.set(title=title, xlabel="attended pairs / causal's")
    axes[0].set_ylabel("DCP / zigzag")
    return with_legend(figure)


def epsilon(rows: Sequence[Row]) -> Figure:
    figure, axes = panels("Bytes against the compute imbalance that is allowed")
    for axis, mask in zip(axes, MASKS):
        own = [row for row in rows if row["mask"] == mask]
        for key, what, colour in zip(("inter", "total"), ("between nodes", "in total"), COLOURS):
            axis.plot([row["epsilon"] for row in own], [row[key] for row in own], "o-", color=colour, label=what)
        axis.set(title=mask, xlabel="epsilon", yscale="log")
    axes[0].set_ylabel("MB, forward and backward")
    return with_legend(figure)


def training(rows: Sequence[Row]) -> Figure:
    figure, axes = panels("Predicted training step, best static scheme over DCP (8B model, TP 4 x DCP 16)", 2)
    for axis, dataset in zip(axes, dict.fromkeys(row["dataset"] for row in rows)):
        for mask, colour in zip(MASKS, COLOURS):
            own = sorted((row for row in rows if (row["dataset"], row["mask"]) == (dataset, mask)), key=_longest)
            names = [f"{row['longest'] / 1024:g}k" for row in own]
            axis.plot(names, [row["static_s"] / row["dcp_s"] for row in own], "o-", color=colour, label=mask)
        axis.axhline(1, color="0.5", lw=0.8)
        axis.set(title=dataset, xlabel="longest row, tokens")
    axes[0].set_ylabel("speed-up")
    return with_legend(figure)


def _longest(row: Row) -> int:
    return row["longest"]


def attention_seconds(cells: Sequence[Row]) -> Figure:
    """Medians over data sets."""
    figure, axes = panels("Measured attention by mask and length scale, 4 nodes x 1 rank, 100 Mbit/s")
    for axis, kind in zip(axes, KINDS):
        own = [cell for cell in cells if cell["mask"].startswith(kind) and "@" in cell["batch"]]
        scales = sorted({_scale(cell) for cell in own})
        for (name, label), colour in zip(CONTESTANTS.items(), COLOURS):
            values = [statistics.median(_seconds(cell, name) for cell in own if _scale(cell) == s) for s in scales]
            axis.plot([f"{s:g}" for s in scales], values, "o-", color=colour, label=label)
        axis.set(title=kind, xlabel="length scale", ylim=(0, None))
    axes[0].set_ylabel("s, forward and backward")
    return with_legend(figure)


def decomposition(cells: Sequence[Row]) -> Figure:
    """Means over cells."""
    figure, axes = panels("Decomposition of attention, 4 nodes x 1 rank, 100 Mbit/s: DCP, best dense, best row-exact")
    for axis, kind in zip(axes, KINDS):
        own = [cell for cell in cells if cell["mask"].startswith(kind)]
        below = [0.0] * 3
        for bar, colour in zip(BARS, COLOURS):
            values = [
                statistics.fmean(_spans(cell, name, bar) for cell in own) for name in ("dcp", "dense", "row_exact")
            ]
            axis.bar(
                ["DCP", "dense", "row-exact"], values, bottom=below, color=colour, label=bar[:-2].replace("_", " ")
            )
            below = [b + value for b, value in zip(below, values)]
        axis.set(title=kind)
    axes[0].set_ylabel("s, forward and backward")
    return with_legend(figure)


def _scale(cell: Row) -> float:
    return float(cell["batch"].partition("@")[2].partition("/")[0])


def _plan(cell: Row, name: str) -> dict[str, Any]:
    return cell["plans"][name if name == "dcp" else cell["speedups"][name]["total"]["best"]]


def _seconds(cell: Row, name: str) -> float:
    return sum(_plan(cell, name)[which]["seconds"] for which in PASSES)


def _spans(cell: Row, name: str, bar: str) -> float:
    return sum(_plan(cell, name)[which]["decomposition"][bar] for which in PASSES)


def read_cells(file: Path) -> list[Row]:
    """Those of one rank a node at 100 Mbit/s."""
    cells = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    return [cell for cell in cells if (cell["nodes"], cell["per_node"], cell["mbit"]) == (4, 1, 100)]


def measure(names: Iterable[str], scale: Scale, file: Path) -> None:
    """Run these studies, and put their rows into ``file`` beside those of others."""
    numbers = json.loads(file.read_text("utf-8")) if file.exists() else {}
    for name in names:
        numbers[name] = []
        for row in STUDIES[name](scale):
            print(f"{name}: {row}", file=sys.stderr, flush=True)
            numbers[name].append({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
        studies = (f'"{key}": [\n' + ",\n".join(json.dumps(row) for row in rows) + "]" for key, rows in numbers.items())
        file.write_text("{" + ",\n".join(studies) + "}\n", "utf-8")


PLOTS: dict[str, tuple[str, Callable[[Sequence[Row]], Figure]]] = {
    "block_size_bytes": ("block_size", block_size_bytes),
    "block_size_seconds": ("block_size", block_size_seconds),
    "sparsity": ("sparsity", sparsity),
    "epsilon": ("epsilon", epsilon),
    "training": ("training", training),
}
"""Name of the image -> (study, how it is drawn)."""
CELL_PLOTS = {"attention_seconds": attention_seconds, "decomposition": decomposition}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs="+", default=[], choices=[*STUDIES, "all"], help="studies to run anew")
    parser.add_argument("--numbers", type=Path, default=NUMBERS, help="where the studies' rows are")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images", help="folder of the plots")
    parser.add_argument("--tokens", type=int, default=Scale.tokens, help="of a batch")
    parser.add_argument("--batches", type=int, default=Scale.batches)
    parser.add_argument("--nodes", type=int, default=Scale.nodes)
    parser.add_argument("--devices-per-node", type=int, default=Scale.devices)
    options = parser.parse_args(argv)
    scale = Scale(options.tokens, options.batches, options.nodes, options.devices_per_node)
    measure(STUDIES if "all" in options.measure else options.measure, scale, options.numbers)
    numbers = json.loads(options.numbers.read_text("utf-8"))
    drawn = {name: draw(numbers[study]) for name, (study, draw) in PLOTS.items() if study in numbers}
    cells = read_cells(MEASURED)
    for name, figure in {**drawn, **{name: draw(cells) for name, draw in CELL_PLOTS.items()}}.items():
        figure.savefig(options.images / f"{name}.png", dpi=110)


if __name__ == "__main__":
    main()
