"""Plans of batches of public data sets: CPU seconds, bytes against static schemes and the bound, and both limits.

    python benchmarks/planner_datasets.py run results.jsonl [--batches 200] [--minutes 8] [--part 0/2]
    python benchmarks/planner_datasets.py table results.jsonl [--losses 20]

131,072 tokens on 4 nodes of 8 devices, 8:2 heads of 128, bf16; compute at most 1.10 of the mean, tokens 1.05. `run`
appends one line per batch and mask, and goes on where it was stopped: batch numbers come first, so that all that has been
run is an even sample of data sets, scales and masks. `--part I/N` runs every N-th case, into a file of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.lengths import batches, read_distributions
from hf_dcp.bench.batches import with_mask
from hf_dcp.bench.planner import PlannerSettings, plan_one
from hf_dcp.config import DcpConfig
from hf_dcp.planning.batch import ModelShape, Topology
from hf_dcp.planning.planner import plan_batch

TOKENS = 131072
SCALES = (0.5, 1, 2, 4)
MASKS = ("causal", "lambda:64,4096", "blockwise:256,2,1,1", "shared:0.2x4")
SETTINGS = PlannerSettings(
    Topology.grid(4, 8), ModelShape(8, 2, 128), DcpConfig(), ("ring", "zigzag", "head-ring", "loongtrain"), 1, 0
)
KEYS = ("compute_imbalance", "token_imbalance", "limits", "status", "excess", "cost", "placement", "tiles", "bound")
Case = tuple[int, str, float, str]
"""Number of the batch of its data set and scale, data set, scale, mask."""


def cases(count: int) -> Iterator[Case]:
    """``count`` batches of every data set, as many at each scale at which sequences fit, batch numbers first."""
    tables = read_distributions()
    scales = {name: [s for s in SCALES if s * table.length[0] < 0.99 * TOKENS] for name, table in tables.items()}
    for number in range(count):
        for mask in MASKS:
            for scale in SCALES:
                for name in tables:
                    if scale in scales[name] and number < -(-count // len(scales[name])):
                        yield number, name, scale, mask


def run(file: Path, count: int, minutes: float, part: int, parts: int) -> None:
    """Append the cases that the file doesn't have yet, until the time is over."""
    until = time.monotonic() + 60 * minutes
    done = {key(entry) for entry in read([file])} if file.exists() else set()
    lengths = _Batches()
    for mask in MASKS:  # compiled code is loaded
        plan_batch(with_mask(lengths.at(0, "magi_default", 1), mask), SETTINGS.topology, SETTINGS.shape)
    with file.open("a") as out:
        for case in islice(cases(count), part, None, parts):
            if case in done:
                continue
            if time.monotonic() > until:
                return
            out.write(json.dumps(entry_of(case, lengths.at(*case[:3]))) + "\n")
            out.flush()


class _Batches:
    """The batches of all data sets and scales, drawn as they are asked for."""

    def __init__(self) -> None:
        self.tables = read_distributions()
        self.streams: dict[tuple[str, float], Iterator[list[int]]] = {}
        self.drawn: dict[tuple[str, float], list[list[int]]] = {}

    def at(self, number: int, name: str, scale: float) -> list[int]:
        where = (name, scale)
        stream = self.streams.setdefault(where, batches(self.tables[name], scale, TOKENS, seed=0))
        drawn = self.drawn.setdefault(where, [])
        drawn.extend(islice(stream, max(0, number + 1 - len(drawn))))
        return drawn[number]


def entry_of(case: Case, lengths: Sequence[int]) -> dict[str, Any]:
    """What is kept of one case: a line of the results."""
    number, name, scale, mask = case
    report = plan_one(with_mask(lengths, mask), SETTINGS)
    forward = report["forward"]
    return {
        "batch": number,
        "dataset": name,
        "scale": scale,
        "mask": mask,
        "lengths": report["lengths"],
        **{k: report[k] for k in KEYS},
        "forward_bytes": [forward["inter_node_bytes"], forward["inter_node_bytes"] + forward["intra_node_bytes"]],
        "cpu_s": report["planning_cpu_s"],
        "plan_bytes": report["plan_bytes_per_rank"]["max"],
        "to_bound": report["ratio_to_bound"],
        "best": report["best"],
    }


def key(entry: dict[str, Any]) -> Case:
    return entry["batch"], entry["dataset"], entry["scale"], entry["mask"]


def read(files: Sequence[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def table(files: Sequence[Path], losses: int) -> None:
    """Medians and 99th percentiles as Markdown, by mask and by data set; then batches that lose."""
    entries = read(files)
    print(f"{len(entries)} plans of {len({key(e)[:3] for e in entries})} batches\n")
    for field in ("mask", "dataset", "scale"):
        print(HEAD.format(field) + "\n|---|" + "---:|" * HEAD.count("|", 5))
        for value in dict.fromkeys(e[field] for e in entries):
            print(_row(value, [e for e in entries if e[field] == value]))
        print(_row("all", entries) + "\n")
    lost = [e for e in entries if loss(e) > 1]
    print(f"{len(lost)} lose against a static scheme within the limits")
    for entry in sorted(lost, key=loss, reverse=True)[:losses]:
        print(f"- {loss(entry):.3f} {entry['best']['balanced']['name']}: {', '.join(map(str, key(entry)))}")


HEAD = (
    "| {} | plans | CPU s | to best dense | to best row-exact | … within limits | to bound | above limits | "
    "best possible | largest rank plan, KB |"
)


def _row(name: Any, entries: list[dict[str, Any]]) -> str:
    ratios = {kind: [e["best"][kind]["ratio"] for e in entries if kind in e["best"]] for kind in BEST}
    cells = [
        str(name),
        str(len(entries)),
        _pair([e["cpu_s"]["total"] for e in entries], 3),
        *(_pair(ratios[kind], 2) for kind in BEST),
        _pair([e["to_bound"] for e in entries], 2),
        str(sum(e["status"] == "unbalanced" for e in entries)),
        str(sum(e["status"] == "best_possible" for e in entries)),
        f"{max(e['plan_bytes'] for e in entries) / 1024:.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


BEST = ("dense", "row_exact", "balanced")


def _pair(values: Sequence[float | None], digits: int) -> str:
    """Median / 99th percentile. Ratios to nothing are left out, and counted."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    return " / ".join(f"{x:.{digits}f}" for x in np.percentile(known, (50, 99))) + (
        f" ({len(known)})" if len(known) < len(values) else ""
    )


def loss(entry: dict[str, Any]) -> float:
    """The plan's cost over that of the best static scheme within the limits; 0 where there is none."""
    return entry["best"].get("balanced", {}).get("ratio") or 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("file", type=Path)
    running.add_argument("--batches", type=int, default=200, help="of every data set, over its scales")
    running.add_argument("--minutes", type=float, default=1e9)
    running.add_argument("--part", default="0/1")
    showing = commands.add_parser("table")
    showing.add_argument("files", type=Path, nargs="+")
    showing.add_argument("--losses", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.command == "table":
        table(arguments.files, arguments.losses)
        return
    part, parts = map(int, arguments.part.split("/"))
    run(arguments.file, arguments.batches, arguments.minutes, part, parts)


if __name__ == "__main__":
    main()
