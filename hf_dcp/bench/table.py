"""The report of a benchmark for people."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from hf_dcp.bench.compare import RIVALS
from hf_dcp.planning.plan import PASSES

PARTS = {"exposed_exchange_s": "exposed", "attention_s": "attention", "overlapped_s": "overlapped",
         "reduction_s": "reduction", "other_s": "other"}  # fmt: skip

WIDTH = 180


def show(report: dict[str, Any], console: Console | None = None) -> None:
    """Print the report of `hf_dcp.bench.attention.bench_attention`."""
    # into a file or a pipe: as wide as the tables want
    out = console or Console(width=None if sys.stdout.isatty() else WIDTH)
    nodes = len(set(report["node_of_rank"]))
    out.print(
        f"{report['world_size']} ranks on {nodes} nodes, heads {report['heads']}:{report['kv_heads']}, head dim "
        f"{report['head_dim']}, {report['dtype']}; medians of {report['repeats']} rounds, the slowest rank counts"
    )
    for result in report["results"]:
        out.print(_batch_table(result))
        for kind, entry in result["speedups"].items():
            out.print(f"dcp over {_speedup(kind, entry['total'])}")
    if len(report["results"]) > 1 and any(kind in r["speedups"] for r in report["results"] for kind in RIVALS):
        out.print(_summary_table(report["summary"]))


def _speedup(kind: str, total: dict[str, Any]) -> str:
    ceiling = f", ceiling {total['ceiling']:.2f}x" if "ceiling" in total else ""
    return f"{total['best']} (the best {kind.replace('_', '-')} scheme): {total['speedup']:.2f}x{ceiling}"


def _batch_table(result: dict[str, Any]) -> Table:
    lengths = result["lengths"]
    title = f"batch {result['batch']}, {result['mask']}: {sum(lengths):,} tokens in {len(lengths)} sequences (ms, MB)"
    table = Table(title=title)
    columns = ("plan", "pass", "time", "compute\nalone", "exchange\nalone", *PARTS.values(), "between\nnodes", "inside")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < 2 else "right")
    for name, plan in result["plans"].items():
        for which in PASSES:
            one = plan[which]
            cells = [_ms(one.get(key)) for key in ("seconds", "compute_s", "exchange_s")]
            cells += [_ms(one.get("decomposition", {}).get(key)) for key in PARTS]
            cells += [f"{value / 1e6:.1f}" for value in one.get("bytes_sent", {}).values()]
            table.add_row(name if which == PASSES[0] else "", which, *cells)
    return table


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"


def _summary_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="medians over batches, forward and backward together")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{row[c]:.2f}" if isinstance(row.get(c), float) else str(row.get(c, "")) for c in columns))
    return table
