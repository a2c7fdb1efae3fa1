"""The report of the planner benchmark for people."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from hf_dcp.bench.planner import PARTS

WIDTH = 200
KINDS = {"dense": "dense", "row_exact": "row exact", "balanced": "within limits"}


def show(report: dict[str, Any], console: Console | None = None) -> None:
    """Print the report of `hf_dcp.bench.planner.bench_planner`."""
    # into a file or a pipe: as wide as the table wants
    out = console or Console(width=None if sys.stdout.isatty() else WIDTH)
    nodes = report["node_of_rank"]
    out.print(
        f"{len(nodes)} devices on {len(set(nodes))} nodes, heads {report['heads']}:{report['kv_heads']}, head dim "
        f"{report['head_dim']}, {report['dtype']}; CPU seconds are medians of {report['repeats']} plannings"
    )
    out.print(_plans_table(report["results"]))
    if any(result["against"] for result in report["results"]):
        out.print(_rivals_table(report["results"]))


def _plans_table(results: list[dict[str, Any]]) -> Table:
    table = Table(title="MB (1,000,000 bytes) between nodes / in total; imbalances are max / mean")
    for column in ("batch", "mask", "placement", "status"):
        table.add_column(column)
    numbers = ("forward", "backward", "of bound", "compute", "tokens", "CPU s", *PARTS, *KINDS.values())
    for column in numbers:
        table.add_column(column, justify="right")
    for result in results:
        seconds = result["planning_cpu_s"]
        best = [result["best"].get(kind, {}) for kind in KINDS]
        table.add_row(
            result["batch"],
            result["mask"],
            result["placement"],
            result["status"],
            *(megabytes(result[which]) for which in ("forward", "backward")),
            _number(result["ratio_to_bound"]),
            *(_number(result[key], 3) for key in ("compute_imbalance", "token_imbalance")),
            *(_number(seconds.get(part), 3) for part in ("total", *PARTS)),
            *(f"{_number(entry['ratio'])} {entry['name']}" if entry else "" for entry in best),
        )
    return table


def _rivals_table(results: list[dict[str, Any]]) -> Table:
    table = Table(title="compared with, in MB between nodes / in total; ratio: the plan's cost over the rival's")
    for i, column in enumerate(
        ("batch", "mask", "rival", "forward", "backward", "compute", "tokens", "CPU s", "ratio")
    ):
        table.add_column(column, justify="left" if i < 3 else "right")
    for result in results:
        for name, kinds in result["against"].items():
            for kind, entry in kinds.items():
                table.add_row(
                    result["batch"],
                    result["mask"],
                    f"{name}, {kind.replace('_', ' ')}",
                    *(megabytes(entry[which]) for which in ("forward", "backward")),
                    *(
                        _number(entry.get(key), 3)
                        for key in ("compute_imbalance", "token_imbalance", "placement_cpu_s")
                    ),
                    _number(entry["ratio"]),
                )
    return table


def megabytes(sent: dict[str, int]) -> str:
    """Bytes of one pass as "between nodes / in total", in MB."""
    inter = sent["inter_node_bytes"]
    return f"{inter / 1e6:,.1f} / {(inter + sent['intra_node_bytes']) / 1e6:,.1f}"


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"
