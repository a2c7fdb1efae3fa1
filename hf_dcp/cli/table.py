"""`hf-dcp plan` for people: one table of bytes, a few lines around it."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

KEYS = ("inter_node_bytes", "intra_node_bytes", "max_device_bytes")


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
        f"predicted attention: forward {times['forward_s'] * 1e3:.2f} ms, backward "
        f"{times['backward_s'] * 1e3:.2f} ms, of which exposed exchange {times['exposed_s'] * 1e3:.2f} ms"
    )
    sizes = report["plan_bytes_per_rank"]
    out.print(f"rank plans: at most {sizes['max']:,} bytes; digest {report['digest']}")


def _bytes_table(report: dict[str, Any]) -> Table:
    table = Table(title="MB (1,000,000 bytes) between nodes / inside nodes / of the busiest device")
    table.add_column("scheme", no_wrap=True)
    table.add_column("forward", justify="right", no_wrap=True)
    table.add_column("backward", justify="right", no_wrap=True)
    _add_row(table, "DCP", report)
    for name, scheme in report["baselines"].items():
        for kind, entry in scheme.items():
            _add_row(table, f"{name}, {kind.replace('_', ' ')}", entry)
    return table


def _add_row(table: Table, name: str, entry: dict[str, Any]) -> None:
    cells = [" / ".join(f"{entry[which][key] / 1e6:,.1f}" for key in KEYS) for which in ("forward", "backward")]
    table.add_row(name, *cells)


def _block_size(value: int | dict[str, int]) -> str:
    return f"{value['min']} to {value['max']}" if isinstance(value, dict) else str(value)
