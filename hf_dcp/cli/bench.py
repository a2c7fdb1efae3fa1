"""`hf-dcp bench`: measure plans on this machine, or on all that a launcher has started it on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hf_dcp.cli.inputs import parse_lengths, read_config, read_shape

Option = typer.Option
app = typer.Typer(help="Measure plans side by side.")
DEFAULT = "dcp,zigzag-dense,zigzag"


@app.callback()
def _bench() -> None:
    """Measure plans side by side."""


@app.command()
def attention(
    lengths: Annotated[str | None, Option(help="Tokens of each sequence of one batch, such as 4096,512.")] = None,
    batches: Annotated[Path | None, Option(help="JSON file: one or more lists of lengths.")] = None,
    mask: Annotated[list[str] | None, Option(help="Mask, such as causal; repeat it for more. Default: causal.")] = None,
    placements: Annotated[str, Option(help="What to compare, with commas between; see the docs.")] = DEFAULT,
    nodes: Annotated[int | None, Option(help="As if ranks were on so many nodes; default: as launched.")] = None,
    heads: Annotated[int, Option(help="Query heads.")] = 8,
    kv_heads: Annotated[int, Option(help="KV heads.")] = 2,
    head_dim: Annotated[int, Option(help="Elements of a head.")] = 64,
    dtype: Annotated[str, Option(help="Type of Q, K and V: bf16, fp16, fp32 or fp64.")] = "fp32",
    reduce_dtype: Annotated[str | None, Option(help="Type of partial results on the wire; default: --dtype.")] = None,
    window: Annotated[str, Option(help="Sliding window of the layer, or none.")] = "none",
    block_size: Annotated[str, Option(help="Tokens of a block, or auto.")] = "auto",
    head_groups: Annotated[str, Option(help="Head groups, or auto.")] = "auto",
    epsilon: Annotated[float | None, Option(help="Allowed compute imbalance.")] = None,
    divisions: Annotated[int | None, Option(help="At most so many divisions per attention call.")] = None,
    seed: Annotated[int | None, Option(help="Seed of the planner.")] = None,
    backward_kv: Annotated[str | None, Option(help="refetch or keep remote rows for backward.")] = None,
    divide: Annotated[int, Option(help="Divide all lengths by this.")] = 1,
    limit: Annotated[int | None, Option(help="Only the first so many batches.")] = None,
    repeats: Annotated[int, Option(help="Rounds that count.")] = 5,
    warmup: Annotated[int, Option(help="Rounds before them.")] = 1,
    alone: Annotated[bool, Option(help="Also measure compute and exchange alone, for the ceilings.")] = True,
    device: Annotated[str, Option(help="cpu or cuda.")] = "cpu",
    trace: Annotated[Path | None, Option(help="File for a Chrome trace of the last round of the last batch.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON, alone on standard output.")] = False,
) -> None:
    """Attention forward and backward under several plans, in turns. Start it once per rank, as with torchrun."""
    from hf_dcp.bench.batches import read_batches, shortened

    if (lengths is None) == (batches is None):
        raise ValueError("give either --lengths, such as --lengths 4096,512, or --batches FILE.json")
    if trace is not None and not trace.absolute().parent.is_dir():
        raise ValueError(f"--trace {trace} is in a folder that doesn't exist: name a file in another")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, not {device!r}")
    named = [("0", parse_lengths(lengths or ""))] if batches is None else read_batches(batches)
    config = read_config(
        block_size,
        head_groups,
        epsilon=epsilon,
        divisions=divisions,
        seed=seed,
        reduce_dtype=reduce_dtype,
        backward_kv=backward_kv,
    )
    shape = read_shape(heads, kv_heads, head_dim, dtype, [window])
    from hf_dcp.bench.attention import Settings, bench_attention
    from hf_dcp.bench.group import Group

    settings = Settings(tuple(placements.split(",")), shape, config, repeats, warmup, alone, trace is not None)
    group = Group.join(device, nodes)
    try:
        report, events = bench_attention(shortened(named, divide, limit), mask or ["causal"], settings, group)
    finally:
        group.leave()
    if group.rank == 0:
        _print(report, events, trace, as_json)


def _print(report: dict, events: list, trace: Path | None, as_json: bool) -> None:
    if trace is not None:
        trace.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    if as_json:
        print(json.dumps(report))
        return
    from hf_dcp.bench.table import show

    show(report)
