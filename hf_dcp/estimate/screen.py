"""An estimate on one screen of a terminal."""

from __future__ import annotations

import sys

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_dcp.estimate.run import Estimate
from hf_dcp.estimate.schemes import DCP
from hf_dcp.estimate.summary import SchemeSummary

BAR = 40
WIDTH = 110
"""Into a file or a pipe."""
WIDE = 100
COLUMNS = (
    "scheme", "attention\nms", "waiting\nms", "step\nms", "DCP's\nspeed-up", "10-90 %\nbatches", "between\nnodes GB",
    "inside\nGB", "busiest\nGB", "max/\nmean", "layer\nMB",
)  # fmt: skip
WIDE_ONLY = ("waiting\nms", "inside\nGB", "busiest\nGB")


def show(answer: Estimate, console: Console | None = None) -> None:
    """Print histogram, table, rates, and last of all the verdict."""
    out = console or Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    asked, tokens = answer.question, answer.lengths.tokens
    out.print(f"[bold]{len(tokens):,} rows, {int(tokens.sum()):,} tokens[/] ({answer.lengths.source})")
    for line in _bars(answer):
        out.print(line)
    out.print(_table(answer, out.width))
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
        f"{one.low:>9,} to {one.high - 1:>9,} [cyan]{bar(one.rows / most):{BAR}}[/] "
        f"{one.rows / rows:6.1%} of rows, {one.tokens / tokens:6.1%} of tokens"
        for one in bins
    ]


def bar(share: float) -> str:
    """Blocks, to an eighth of a character."""
    eighths = round(BAR * 8 * share)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _table(answer: Estimate, width: int) -> Table:
    topology = answer.question.topology
    where = f"{topology.world_size} devices on {topology.num_nodes} node{'s' if topology.num_nodes > 1 else ''}"
    table = Table(
        title=f"per step, {where}", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left"
    )
    shown = [column for column in COLUMNS if width >= WIDE or column not in WIDE_ONLY]
    for column in shown:
        table.add_column(column, justify="left" if column == "scheme" else "right", no_wrap=True)
    for name, one in answer.schemes.items():
        row = cells(name, one)
        table.add_row(*(row[column] for column in shown), style="bold green" if name == DCP else None)
    return table


def cells(name: str, one: SchemeSummary) -> dict[str, str]:
    """A row of the table: `COLUMNS` -> text."""
    own = name == DCP
    texts = (
        name,
        f"{one.attention_s * 1e3:,.0f}",
        f"{one.exposed_s * 1e3:,.0f}",
        f"{one.step_s * 1e3:,.0f}",
        "" if own else f"{one.speedup:.2f}x",
        "" if own else f"{one.spread[0]:.2f}-{one.spread[1]:.2f}",
        f"{one.inter_bytes / 1e9:,.2f}",
        f"{one.intra_bytes / 1e9:,.2f}",
        f"{one.device_bytes / 1e9:,.2f}",
        f"{one.imbalance:.2f}",
        f"{one.memory / 1e6:,.0f}",
    )
    return dict(zip(COLUMNS, texts, strict=True))
