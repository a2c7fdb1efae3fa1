#!/usr/bin/env python
"""Tables and a plot of what `benchmarks/cluster.py` has measured.

    python benchmarks/cluster_report.py results.jsonl --page docs/performance-attention.md

writes the tables between the marks of the page, the plot beside it, and what they are made of, the try of every cell
in which other programs took least of the CPUs, into ``benchmarks/data/cluster_results.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from hf_dcp.planning.plan import PASSES

BEGIN, END = "<!-- cluster: begin -->", "<!-- cluster: end -->"
KEPT = Path(__file__).parent / "data" / "cluster_results.jsonl"
PAPER = {"causal": 2.45, "sparse": 3.77}
"""The best figures of the paper, over the best static scheme; asked for where the ceiling is 1.25 times as high."""
MARKERS = {"causal": "o", "lambda:8,512": "s", "blockwise:32,2,1,1": "^", "shared:0.2x4": "D"}


@dataclass(frozen=True)
class Cell:
    """One cell's result, seconds and bytes being those of forward and backward together."""

    raw: dict[str, Any]

    @property
    def setting(self) -> tuple[int, int, int]:
        return self.raw["nodes"], self.raw["per_node"], self.raw["mbit"]

    @property
    def mask(self) -> str:
        return self.raw["mask"]

    @property
    def name(self) -> str:
        return self.raw["batch"].removesuffix("/0")

    @property
    def dense(self) -> dict[str, Any]:
        return self.raw["speedups"]["dense"]["total"]

    @property
    def exact(self) -> dict[str, Any]:
        return self.raw["speedups"]["row_exact"]["total"]

    @property
    def share(self) -> float:
        """Of the ceiling; a ceiling below 1 counts as it is."""
        return self.dense["speedup"] / self.dense["ceiling"]

    @property
    def paper(self) -> float:
        return PAPER["causal" if self.mask == "causal" else "sparse"]

    @property
    def rounds(self) -> str:
        """Of dcp, and of the best dense scheme."""
        return f"{self.raw['rounds']['dcp']}, {self.raw['rounds'][self.dense['best']]}"

    def seconds(self, plan: str) -> float:
        return sum(self.raw["plans"][plan][which]["seconds"] for which in PASSES)

    def megabytes(self, plan: str) -> float:
        return sum(self.raw["plans"][plan][which]["bytes_sent"]["inter"] for which in PASSES) / 1e6

    def alone(self, part: str) -> float:
        return sum(self.raw["plans"]["dcp"][which][part] for which in PASSES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    cells = read(options.results)
    text = report(cells)
    if options.page is None:
        print(text)
        return
    image = options.page.parent / "images" / "cluster.png"
    plot(cells, image)
    before, rest = options.page.read_text().split(BEGIN)
    options.page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")
    KEPT.write_text("".join(json.dumps(cell.raw) + "\n" for cell in cells))


def read(files: Iterable[Path]) -> list[Cell]:
    """The best try of every cell, in a fixed order."""
    best: dict[tuple, dict[str, Any]] = {}
    for line in (line for file in files for line in file.read_text().splitlines()):
        raw = json.loads(line)
        key = (raw["nodes"], raw["per_node"], raw["mbit"], raw["batch"], raw["mask"])
        if key not in best or raw["foreign_cpu"] < best[key]["foreign_cpu"]:
            best[key] = raw
    for raw in best.values():
        for plan in raw["plans"].values():
            for which in PASSES:
                plan[which] = {name: _rounded(value) for name, value in plan[which].items()}
    masks = list(MARKERS)
    return [Cell(best[key]) for key in sorted(best, key=lambda key: (*key[:4], masks.index(key[4])))]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return round(value, 4) if isinstance(value, float) else value


def report(cells: list[Cell]) -> str:
    parts = []
    for setting in dict.fromkeys(cell.setting for cell in cells):
        own = [cell for cell in cells if cell.setting == setting]
        nodes, per_node, mbit = setting
        parts.append(f"### {nodes} nodes x {per_node} rank{'s' * (per_node > 1)}, {mbit} Mbit/s\n\n{_summary(own)}")
        parts.append(_losses(own))
        parts.append(f"<details><summary>All {len(own)} cells</summary>\n\n{_cells(own)}\n\n</details>")
    return "\n\n".join(parts)


def _summary(cells: list[Cell]) -> str:
    rows = []
    for mask in (mask for mask in MARKERS if any(cell.mask == mask for cell in cells)):
        own = [cell for cell in cells if cell.mask == mask]
        high = [cell for cell in own if cell.dense["ceiling"] >= 1.25 * cell.paper]
        met = sum(cell.dense["speedup"] >= cell.paper for cell in high)
        values = [cell.dense["speedup"] for cell in own]
        rows.append(
            f"| {mask} | {len(own)} | {_median(values)} ({min(values):.2f} – {max(values):.2f}) | "
            f"{_median(cell.dense['ceiling'] for cell in own)} | {_median(cell.share for cell in own)} | "
            f"{f'{met} of {len(high)}' if high else '–'} | {_median(cell.exact['speedup'] for cell in own)} |"
        )
    whole = f"Median share of the ceiling over all {len(cells)} cells: **{_median(cell.share for cell in cells)}**."
    ratios = [cell.raw["wire_bytes"] / cell.raw["wire_planned"] for cell in cells if cell.raw["wire_planned"]]
    wire = f"The interfaces counted {min(ratios):.3f} to {max(ratios):.3f} times the planned bytes (protocol overhead)."
    head = (
        "| mask | cells | speed-up over the best dense (range) | ceiling | share of the ceiling | "
        "at least the paper's where the ceiling is 1.25 x it | speed-up over the best row-exact |\n"
        "|---|---|---|---|---|---|---|"
    )
    return "\n".join([head, *rows, "", whole, wire])


def _median(values: Iterable[float]) -> str:
    return f"{statistics.median(values):.2f}"


def _losses(cells: list[Cell]) -> str:
    lines = []
    for cell in cells:
        for kind, entry in (("dense", cell.dense), ("row-exact", cell.exact)):
            if entry["speedup"] < 1:
                lines.append(f"- {cell.name}, {cell.mask}: {entry['speedup']:.2f} x {entry['best']} ({kind})")
    return "\n".join(["Cells that DCP loses:", "", *lines]) if lines else "DCP loses no cell."


def _cells(cells: list[Cell]) -> str:
    head = (
        "| batch | sequences (longest) | mask | DCP s (compute, exchange alone) | best dense s | best row-exact s | "
        "speed-up | ceiling | over row-exact | MB between nodes: DCP, dense | rounds | others' CPU |\n|" + "---|" * 12
    )
    rows = [
        f"| {cell.name} | {len(cell.raw['lengths'])} ({max(cell.raw['lengths'])}) | {cell.mask} | "
        f"{cell.seconds('dcp'):.2f} ({cell.alone('compute_s'):.2f}, {cell.alone('exchange_s'):.2f}) | "
        f"{cell.seconds(cell.dense['best']):.2f} {cell.dense['best'].removesuffix('-dense')} | "
        f"{cell.seconds(cell.exact['best']):.2f} {cell.exact['best']} | {cell.dense['speedup']:.2f} | "
        f"{cell.dense['ceiling']:.2f} | {cell.exact['speedup']:.2f} | {cell.megabytes('dcp'):.1f}, "
        f"{cell.megabytes(cell.dense['best']):.1f} | {cell.rounds} | {cell.raw['foreign_cpu']:.0%} |"
        for cell in cells
    ]
    return "\n".join([head, *rows])


def plot(cells: list[Cell], file: Path) -> None:
    """Speed-up against ceiling, a panel per setting."""
    settings = list(dict.fromkeys(cell.setting for cell in cells))
    figure, axes = plt.subplots(1, len(settings), figsize=(1 + 4.2 * len(settings), 4.4), squeeze=False)
    for axis, setting in zip(axes[0], settings):
        own = [cell for cell in cells if cell.setting == setting]
        values = [value for cell in own for value in (cell.dense["ceiling"], cell.dense["speedup"])]
        span = [0.9 * min(*values, 1.0), 1.1 * max(values)]
        axis.plot(span, span, color="0.4", lw=1, label="ceiling")
        axis.plot(span, [0.8 * x for x in span], color="0.4", lw=1, ls=":", label="0.8 x ceiling")
        for mask, marker in MARKERS.items():
            points = [(cell.dense["ceiling"], cell.dense["speedup"]) for cell in own if cell.mask == mask]
            if points:
                axis.scatter(*zip(*points), marker=marker, s=28, label=mask, alpha=0.8)
        axis.set(xscale="log", yscale="log", xlim=span, ylim=span, xlabel="ceiling of the speed-up")
        ticks = [x for x in (0.5, 1, 2, 3, 5, 8, 12, 20, 30) if span[0] <= x <= span[1]]
        for one in (axis.xaxis, axis.yaxis):
            one.set_minor_locator(plt.NullLocator())
            one.set_ticks(ticks, [f"{x:g}" for x in ticks])
        axis.set_title("{} nodes x {}, {} Mbit/s".format(*setting), fontsize=10)
    axes[0][0].set_ylabel("measured speed-up over the best dense scheme")
    axes[0][0].legend(fontsize=8)
    figure.savefig(file, dpi=130, bbox_inches="tight")


if __name__ == "__main__":
    main()
