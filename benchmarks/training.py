#!/usr/bin/env python
"""Seconds per step of recipes/sft.py on an emulated cluster: DCP against dense zigzag, which sends every KV row to every rank.

    benchmarks/netcluster 4 1 100 -- hf-dcp bench calibrate --heads 4 --kv-heads 2 --head-dim 64 --dtype fp32 --save rates.json
    benchmarks/netcluster 4 1 100 -- python benchmarks/training.py run results.jsonl --hardware rates.json  # again
    python benchmarks/training.py table results.jsonl

Texts have lengths like those of two published data sets, divided by 8, cut at 2,048 to 16,384 tokens. What the results file
holds already is left out, and no training begins when --budget seconds are over. Only the plans differ: the same recipe,
model, batches and executor. Needs root and iproute2, as `netcluster` does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch.distributed as dist
from accelerate.state import AcceleratorState
from lengths import read_distributions

from hf_dcp.config import DcpConfig
from hf_dcp.lookahead import planning
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.planner import Plan, plan_batch
from hf_dcp.planning.static import plan_static

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
import sft

DATASETS = ("longalign_10k", "ldc_reconstructed")
MAX_LENGTHS = (2048, 16384, 4096, 8192)
MASKS = ("causal", "lambda:8,512", "blockwise:32,2,1,1", "shared:0.2x4")
SHRUNK = 8
"""Lengths of the data sets are divided by so much."""
TOKENS, STEPS, WARM = 16384, 4, 2
CHARACTERS = 3.2
"""Characters of Python's standard library per token of the recipe's tokenizer, roughly."""


@dataclass(frozen=True)
class Cell:
    dataset: str
    max_length: int
    mask: str


def dense_zigzag(batch: BatchSpec, topology: Topology, shape: ModelShape, config: DcpConfig) -> Plan:
    """In place of `plan_batch`: the published ring with zigzag chunks; its report is that of the row-exact one."""
    plan = plan_batch(batch, topology, shape, config.with_changes(placement="zigzag", epsilon=0.1))
    return replace(plan, rank_plans=plan_static("zigzag", batch, topology, shape, config, pad=False).rank_plans)


PLANNERS = {"dcp": plan_batch, "zigzag": dense_zigzag}
"""By scheme."""


def write_texts(dataset: str, folder: Path, count: int = 400) -> Path:
    """Lines of JSON with texts whose lengths are distributed as the data set's, shrunk."""
    rng, choose = np.random.default_rng(0), random.Random(0)
    lengths = read_distributions()[dataset].at(rng.random(count)) / SHRUNK
    source = "".join(f.read_text(errors="replace") for f in sorted(Path(os.__file__).parent.glob("*.py")))
    file = folder / f"{dataset}.jsonl"
    with file.open("w") as out:
        for length in lengths:
            size = max(8, int(min(length, TOKENS) * CHARACTERS))
            begin = choose.randrange(len(source) - size)
            out.write(json.dumps({"text": source[begin : begin + size]}) + "\n")
    return file


def train(cell: Cell, scheme: str, texts: Path, hardware: str) -> list[float]:
    """Seconds of every step, of the slowest rank. Collective."""
    options = {
        "dataset": str(texts),
        "max_length": cell.max_length,
        "tokens_per_batch": TOKENS,
        "mask": cell.mask,
        "max_steps": STEPS,
        "hardware": hardware,
        "epsilon": "auto",
        "disable_tqdm": 1,
        "lookahead": STEPS,
    }
    AcceleratorState._reset_state()
    with mock.patch.object(planning, "plan_batch", PLANNERS[scheme]), tempfile.TemporaryDirectory() as folder:
        argv = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        trainer = sft.build(*sft.parse([*argv, "--output_dir", folder]))
        watching = next(cb for cb in trainer.callback_handler.callbacks if isinstance(cb, sft.hf_dcp.DcpStatsCallback))
        trainer.train()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [period for _, period in watching.total.steps])
    return [max(step) for step in zip(*everyone, strict=True)]


def run(options: argparse.Namespace) -> None:
    begin, longest = time.monotonic(), 0.0
    done = {tuple(line["cell"]) for line in read(options.results)}
    cells = [Cell(*key) for key in ((d, n, m) for n in MAX_LENGTHS for d in DATASETS for m in MASKS)]
    with tempfile.TemporaryDirectory() as folder:
        texts = {name: write_texts(name, Path(folder)) for name in DATASETS}
        for cell in cells:
            late = time.monotonic() - begin + longest > options.budget
            if astuple(cell) in done or (longest and agreed(late)):
                continue
            since = time.monotonic()
            seconds = {s: train(cell, s, texts[cell.dataset], options.hardware) for s in PLANNERS}
            longest = max(longest, time.monotonic() - since)
            if sft.is_main():
                with options.results.open("a") as out:
                    out.write(json.dumps({"cell": astuple(cell), "steps_s": seconds}) + "\n")
                print(*astuple(cell), {s: round(median(v), 3) for s, v in seconds.items()}, file=sys.stderr, flush=True)


def agreed(late: bool) -> bool:
    """Whether any rank says so. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, late)
    return any(everyone)


def median(steps: list[float]) -> float:
    return statistics.median(steps[WARM:])


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(file: Path) -> None:
    print("| data set | longest text | mask | DCP s per step | dense zigzag | ratio |\n|---|---:|---|---:|---:|---:|")
    ratios: dict[str, list[float]] = {}
    for line in sorted(read(file), key=lambda line: (line["cell"][0], line["cell"][1])):
        name, longest, mask = line["cell"]
        dcp, zigzag = (median(line["steps_s"][scheme]) for scheme in PLANNERS)
        ratios.setdefault(mask, []).append(zigzag / dcp)
        print(f"| {name} | {longest} | {mask} | {dcp:.2f} | {zigzag:.2f} | {zigzag / dcp:.2f} |")
    for mask, values in ratios.items():
        print(f"{mask}: {min(values):.2f} to {max(values):.2f}, median {statistics.median(values):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("results", type=Path, help="JSON lines; what is missing is appended")
    parser.add_argument("--hardware", default="a100-efa", help="rates, as recipes/sft.py takes them")
    parser.add_argument("--budget", type=float, default=180.0, help="seconds after which no training begins")
    options = parser.parse_args()
    if options.what == "table":
        table(options.results)
    else:
        run(options)


if __name__ == "__main__":
    main()
