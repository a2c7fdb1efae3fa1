"""How well `hf-dcp estimate` predicts: its ratio of zigzag's time to DCP's against measured ones.

On an emulated cluster, with the same shape for both (see benchmarks/README.md):

    benchmarks/netcluster 4 1 100 -- hf-dcp bench calibrate --heads 8 --kv-heads 2 --head-dim 64 --dtype fp32 --save rates.json
    benchmarks/netcluster 4 1 100 -- hf-dcp bench attention --batches batches.json --placements dcp,zigzag-dense \
        --no-alone --json > measured.json
    python benchmarks/estimate_check.py --rates rates.json measured.json

Reads reports of `hf-dcp bench attention --json`, or JSON lines of `benchmarks/cluster.py`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_dcp.bench.batches import with_mask
from hf_dcp.config import DcpConfig
from hf_dcp.estimate.schemes import DCP, Setting, outcomes
from hf_dcp.planning.batch import ModelShape, Topology
from hf_dcp.planning.plan import PASSES
from hf_dcp.planning.simulate import Rates

GOAL = 0.25
"""A predicted ratio may be off by this part of the measured one."""


@dataclass(frozen=True)
class Check:
    """One batch: seconds of attention, forward and backward, of DCP and of zigzag as published."""

    name: str
    measured: tuple[float, float]
    predicted: tuple[float, float]

    @property
    def ratios(self) -> tuple[float, float]:
        """(measured, predicted) speed-up of DCP."""
        return self.measured[1] / self.measured[0], self.predicted[1] / self.predicted[0]

    @property
    def error(self) -> float:
        measured, predicted = self.ratios
        return predicted / measured - 1


def read(file: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(report of the whole run, result of one batch) of every batch with both contestants."""
    text = file.read_text("utf-8")
    if text.lstrip().startswith('{"world_size"'):
        report = json.loads(text)
        results = [(report, result) for result in report["results"]]
    else:
        shape = {"heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": "fp32"}
        lines = [json.loads(line) for line in text.splitlines()]
        nodes = [[i // line["per_node"] for i in range(line["nodes"] * line["per_node"])] for line in lines]
        results = [({**shape, "node_of_rank": node}, line) for node, line in zip(nodes, lines)]
    yield from ((report, result) for report, result in results if {"dcp", "zigzag-dense"} <= result["plans"].keys())


def check(report: dict[str, Any], result: dict[str, Any], rates: Rates) -> Check:
    shape = ModelShape(report["heads"], report["kv_heads"], report["head_dim"], report["dtype"])
    setting = Setting(Topology(tuple(report["node_of_rank"])), shape, DcpConfig(), rates, flops_per_token=0)
    found = outcomes(with_mask(result["lengths"], result["mask"]), setting)
    seconds = [sum(result["plans"][name][which]["seconds"] for which in PASSES) for name in ("dcp", "zigzag-dense")]
    predicted = found[DCP].attention_s, found["zigzag"].attention_s
    return Check(f"{result['batch']}, {result['mask']}", (seconds[0], seconds[1]), predicted)


def table(checks: list[Check]) -> str:
    lines = [
        "| batch, mask | DCP s: measured, predicted | zigzag s: measured, predicted | ratio: measured, predicted | off by |"
    ]
    lines.append("|---|---|---|---|---|")
    for one in checks:
        cells = [f"{a:.2f}, {b:.2f}" for a, b in (*zip(one.measured, one.predicted), one.ratios)]
        lines.append(f"| {one.name} | {' | '.join(cells)} | {one.error:+.0%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=Path, required=True)
    parser.add_argument("measured", type=Path, nargs="+")
    options = parser.parse_args()
    rates = Rates.read(options.rates)
    checks = [check(report, result, rates) for file in options.measured for report, result in read(file)]
    print(table(checks))
    within = sum(abs(one.error) <= GOAL for one in checks)
    print(f"\n{within} of {len(checks)} within {GOAL:.0%}")


if __name__ == "__main__":
    main()
