"""An estimate on one screen of a terminal."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_dcp.estimate.run import Estimate
from hf_dcp.estimate.schemes import DCP
from hf_dcp.estimate.summary import SchemeSummary

BAR = 40
WIDTH = 110
"""Into a file or a pipe."""


def show(answer: Estimate, console: Console | None = None) -> None:
    """Print histogram, table, rates, and last of all the verdict."""
    out = console or Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    asked, tokens = answer.question, answer.lengths.tokens
    out.print(f"[bold]{len(tokens):,} rows, {int(tokens.sum()):,} tokens[/] ({answer.lengths.source})")
    for line in _bars(answer):
        out.print(line)
    out.print(_table(answer))
    out.print(
        f"{len(answer.outcomes)} of {answer.batches_in_all} batches of at most {asked.tokens_per_batch:,} tokens; mask "
        f"{asked.mask}; planning takes {answer.plan_s:.2f} s of CPU per batch"
    )
    out.print(f"model: {asked.model.source}")
    out.print(f"rates: {asked.hardware.describe()} ({asked.hardware.name}: {asked.hardware.source})")
    for note in answer.notes:
        out.print(note)
    out.print(Text(answer.verdict, style="bold"))


def _bars(answer: Estimate) -> list[str]:
    bins, rows = answer.bins, len(answer.lengths.tokens)
    tokens = max(int(answer.lengths.tokens.sum()), 1)
    most = max(one.rows for one in bins)
    return [
        f"{one.low:>9,} to {one.high - 1:>9,} [cyan]{'█' * max(round(BAR * one.rows / most), 1 if one.rows else 0):{BAR}}[/] "
        f"{one.rows / rows:6.1%} of rows, {one.tokens / tokens:6.1%} of tokens"
        for one in bins
    ]


def _table(answer: Estimate) -> Table:
    topology = answer.question.topology
    table = Table(title=f"per step, on {topology.num_nodes} nodes with {topology.world_size} devices together")
    columns = ("", "attention\nms", "of it\nwaiting", "step\nms", "DCP is\nfaster by", "10 % to 90 %\nof batches")
    columns += ("GB between\nnodes", "GB inside\nnodes", "busiest\ndevice GB", "max /\nmean", "layer\nMB")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for name, one in answer.schemes.items():
        table.add_row(*cells(name, one), style="bold green" if name == DCP else None)
    return table


def cells(name: str, one: SchemeSummary) -> list[str]:
    """A row of the table."""
    own = name == DCP
    return [
        name,
        f"{one.attention_s * 1e3:,.1f}",
        f"{one.exposed_s * 1e3:,.1f}",
        f"{one.step_s * 1e3:,.1f}",
        "" if own else f"{one.speedup:.2f}x",
        "" if own else f"{one.spread[0]:.2f}x to {one.spread[1]:.2f}x",
        f"{one.inter_bytes / 1e9:,.2f}",
        f"{one.intra_bytes / 1e9:,.2f}",
        f"{one.device_bytes / 1e9:,.2f}",
        f"{one.imbalance:.2f}",
        f"{one.memory / 1e6:,.0f}",
    ]
