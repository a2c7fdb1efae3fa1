"""`hf-dcp plan` for people: one table of bytes, a few lines around it."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

COLUMNS = (("inter_node_bytes", "between nodes"), ("intra_node_bytes", "inside nodes"), ("max_device_bytes", "busiest"))


def show_plan(report: dict[str, Any], console: Console | None = None) -> None:
    """Print the report of `hf_dcp.cli.report.plan_report`."""
    out = console or Console()
    seconds = report["planning_cpu_s"]["total"]
    out.print(
        f"{report['tokens']:,} tokens on {report['devices']} devices: placement {report['placement']}, "
        f"blocks of {_block_size(report['block_size'])} tokens, {report['head_groups']} head group(s), "
        f"{report['tiles']:,} tiles; planned in {seconds:.3f} s of CPU"
    )
    out.print(_bytes_table(report))
    out.print(
        f"balance (max / mean): compute {report['compute_imbalance']:.3f}, tokens {report['token_imbalance']:.3f}, "
        f"status {report['status']}"
    )
    times = report["predicted"]
    out.print(
        f"predicted per layer group: forward {times['forward_s'] * 1e3:.2f} ms, backward "
        f"{times['backward_s'] * 1e3:.2f} ms, of which exposed exchange {times['exposed_s'] * 1e3:.2f} ms"
    )
    sizes = report["plan_bytes_per_rank"]
    out.print(f"rank plans: at most {sizes['max']:,} bytes; digest {report['digest']}")


def _bytes_table(report: dict[str, Any]) -> Table:
    table = Table(title="MB of one attention call (1 MB = 1,000,000 bytes)")
    table.add_column("scheme")
    for which in ("forward", "backward"):
        for _, title in COLUMNS:
            table.add_column(f"{which}\n{title}", justify="right")
    _add_row(table, "DCP", report)
    for name, scheme in report.get("baselines", {}).items():
        for kind in ("dense", "row_exact"):
            if kind in scheme:
                _add_row(table, f"{name}, {kind.replace('_', ' ')}", scheme[kind])
    return table


def _add_row(table: Table, name: str, entry: dict[str, Any]) -> None:
    cells = []
    for which in ("forward", "backward"):
        for key, _ in COLUMNS:
            value = entry.get(which, {}).get(key)
            cells.append("" if value is None else f"{value / 1e6:,.1f}")
    table.add_row(name, *cells)


def _block_size(value: int | dict[str, int]) -> str:
    return f"{value['min']} to {value['max']}" if isinstance(value, dict) else str(value)
