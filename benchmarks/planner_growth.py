"""How CPU seconds and bytes of plans grow with tokens and with devices.

    python benchmarks/planner_growth.py run results.jsonl [--minutes 8]
    python benchmarks/planner_growth.py table results.jsonl
    python benchmarks/planner_growth.py plot results.jsonl docs/images/planner_growth.svg

Causal masks, nodes of 8 devices, 8:2 heads of 128, bf16, default limits: one sequence, and three batches that resemble the
`magi_default` data set. `run` appends a line per plan, and goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.lengths import batches, read_distributions
from hf_dcp.bench.planner import timed_plan
from hf_dcp.bench.planner_rivals import best_rivals, rivals
from hf_dcp.config import DcpConfig
from hf_dcp.masks import causal
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.bound import forward_bounds

PER_NODE = 8
TOKENS, DEVICES = 131072, 32
"""What is held while the other grows."""
SIZES = [(TOKENS * 2**i, DEVICES) for i in range(4)] + [(TOKENS, 8 * 2**i) for i in range(7)] + [(TOKENS * 8, 256)]
"""(tokens, devices)"""
WORKLOADS = {"one sequence": 1, "magi_default": 3}
"""Workload -> batches of each size."""
Case = tuple[str, int, int, int]
"""Workload, number of its batch, tokens, devices."""


def cases() -> Iterator[Case]:
    for number in range(max(WORKLOADS.values())):
        for tokens, devices in dict.fromkeys(SIZES):
            for name, count in WORKLOADS.items():
                if number < count:
                    yield name, number, tokens, devices


def lengths_of(name: str, number: int, tokens: int) -> list[int]:
    if name == "one sequence":
        return [tokens]
    return next(islice(batches(read_distributions()[name], 1, tokens, seed=0), number, None))


def run(file: Path, minutes: float) -> None:
    """Append the cases that the file doesn't have yet, until the time is over."""
    until = time.monotonic() + 60 * minutes
    done = {key(entry) for entry in read(file)} if file.exists() else set()
    with file.open("a") as out:
        for case in cases():
            if case not in done and time.monotonic() < until:
                out.write(json.dumps(entry_of(case)) + "\n")
                out.flush()


def entry_of(case: Case) -> dict[str, Any]:
    """What is kept of one case: a line of the results."""
    name, number, tokens, devices = case
    topology = Topology.grid(devices // PER_NODE, PER_NODE)
    batch = BatchSpec(lengths_of(name, number, tokens), causal())
    timed = timed_plan(batch, topology, ModelShape(8, 2, 128), DcpConfig(), repeats=1, warmup=1)
    plan, score = timed.plan, timed.plan.score
    forward = score.passes["forward"]
    # a published scheme's bytes need no placement; those of row-exact ones do, and many sequences make many tiles
    names = ("ring", "zigzag", "head-ring") if len(batch.lengths) * (2 * devices) ** 2 < 200_000 else ()
    found = rivals(plan, names)
    return {
        "workload": name,
        "batch": number,
        "tokens": tokens,
        "devices": devices,
        "sequences": len(batch.lengths),
        "cpu_s": timed.cpu_s,
        "inter_node_bytes": forward.inter_node,
        "total_bytes": forward.inter_node + forward.intra_node,
        "bound": forward_bounds(plan)[1],
        "tiles": sum(len(tiles) for tiles in plan.tiles),
        "plan_bytes": max(map(len, timed.payloads)),
        "compute_imbalance": score.compute_imbalance,
        "token_imbalance": score.token_imbalance,
        "status": score.status,
        "placement": plan.placement.name,
        "best": best_rivals(found),
    }


def key(entry: dict[str, Any]) -> Case:
    return entry["workload"], entry["batch"], entry["tokens"], entry["devices"]


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def groups(entries: list[dict[str, Any]]) -> Iterator[tuple[str, int, int, list[dict[str, Any]]]]:
    """(workload, tokens, devices, entries), in the order of `SIZES`."""
    for name in WORKLOADS:
        for tokens, devices in dict.fromkeys(SIZES):
            those = [e for e in entries if (e["workload"], e["tokens"], e["devices"]) == (name, tokens, devices)]
            if those:
                yield name, tokens, devices, those


def table(file: Path) -> None:
    """Medians over batches as Markdown."""
    print(
        "| workload | tokens | devices | CPU s | of which placement | schedule | tiles | forward MB between nodes / in total "
        "| to bound | largest rank plan, KB | compute | tokens | status |"
    )
    print("|---|" + "---:|" * 11 + "---|")
    for name, tokens, devices, those in groups(read(file)):
        ratios = [e["total_bytes"] / e["bound"] for e in those if e["bound"]]
        cells = [
            *(f"{_median(those, 'cpu_s', part):.2f}" for part in ("total", "placement", "schedule")),
            f"{_median(those, 'tiles'):,.0f}",
            f"{_median(those, 'inter_node_bytes') / 1e6:,.0f} / {_median(those, 'total_bytes') / 1e6:,.0f}",
            f"{statistics.median(ratios):.2f}" if ratios else "–",
            f"{max(e['plan_bytes'] for e in those) / 1024:.1f}",
            *(f"{max(e[k] for e in those):.3f}" for k in ("compute_imbalance", "token_imbalance")),
            ", ".join(sorted({e["status"] for e in those})),
        ]
        print(f"| {name} | {tokens:,} | {devices} | " + " | ".join(cells) + " |")


def _median(entries: list[dict[str, Any]], *keys: str) -> float:
    values: list[Any] = entries
    for k in keys:
        values = [value[k] for value in values]
    return statistics.median(values)


def plot(file: Path, image: Path) -> None:
    """CPU seconds and bytes against tokens, and against devices."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "hf_dcp"  # the same file for the same figures
    from matplotlib import pyplot

    entries = list(groups(read(file)))
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), sharex="col", sharey="row", layout="constrained")
    for column, (label, at) in enumerate((("tokens, on 32 devices", 1), ("devices, 131,072 tokens", 2))):
        held = (DEVICES, TOKENS)[column]
        for name in WORKLOADS:
            points = sorted((e for e in entries if e[0] == name and e[2 - column] == held), key=lambda e: e[at])
            x = [point[at] for point in points]
            axes[0, column].plot(x, [_median(point[3], "cpu_s", "total") for point in points], "o-", label=name)
            for field, style in (("total_bytes", "o-"), ("inter_node_bytes", "o--")):
                y = [_median(point[3], field) / 1e9 or float("nan") for point in points]  # none has no logarithm
                text = name + (", between nodes" if "inter" in field else ", in total")
                color = axes[0, column].lines[-1].get_color()
                axes[1, column].plot(x, y, style, color=color, label=text)
        for row in (0, 1):
            axes[row, column].set_xscale("log", base=2)
            axes[row, column].set_yscale("log")
            axes[row, column].grid(alpha=0.3)
        axes[1, column].set_xlabel(label)
        ticks = sorted({point[at] for point in entries if point[2 - column] == held})
        axes[1, column].set_xticks(ticks, [f"{t // 1024}k" if t >= 4096 else str(t) for t in ticks])
    axes[0, 0].set_ylabel("CPU seconds of a plan")
    axes[1, 0].set_ylabel("forward GB")
    axes[0, 0].legend(fontsize=8, loc="upper left")
    axes[1, 0].legend(fontsize=8, loc="upper left")
    figure.savefig(image, metadata={"Date": None} if image.suffix == ".svg" else None, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "table", "plot"))
    parser.add_argument("file", type=Path)
    parser.add_argument("image", type=Path, nargs="?")
    parser.add_argument("--minutes", type=float, default=1e9)
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.file, arguments.minutes)
    elif arguments.command == "table":
        table(arguments.file)
    elif arguments.image is None:
        parser.error("plot needs the image to write, such as docs/images/planner_growth.svg")
    else:
        plot(arguments.file, arguments.image)


if __name__ == "__main__":
    main()
