"""`hf-dcp bench`: measure plans on this machine, or on all that a launcher has started it on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hf_dcp.cli import options
from hf_dcp.cli.inputs import read_config, read_named, read_shape
from hf_dcp.planning.batch import Topology

Option = typer.Option
app = typer.Typer(help="Measure plans side by side.")
DEFAULT = "dcp,zigzag-dense,zigzag"
STATIC = "ring,zigzag,head-ring,loongtrain"


@app.callback()
def _bench() -> None:
    """Measure plans side by side."""


@app.command()
def attention(
    lengths: options.Lengths = None,
    batches: options.Batches = None,
    mask: options.Masks = None,
    placements: Annotated[str, Option(help="What to compare, with commas between; see the docs.")] = DEFAULT,
    nodes: Annotated[int | None, Option(help="As if ranks were on so many nodes; default: as launched.")] = None,
    heads: options.Heads = 8,
    kv_heads: options.KvHeads = 2,
    head_dim: options.HeadDim = 64,
    dtype: options.Dtype = "fp32",
    reduce_dtype: options.ReduceDtype = None,
    window: Annotated[str, Option(help="Sliding window of the layer, or none.")] = "none",
    block_size: options.BlockSize = "auto",
    head_groups: options.HeadGroups = "auto",
    epsilon: options.Epsilon = None,
    divisions: options.Divisions = None,
    seed: options.Seed = None,
    backward_kv: options.BackwardKv = None,
    divide: options.Divide = 1,
    limit: options.Limit = None,
    repeats: Annotated[int, Option(help="Rounds that count.")] = 5,
    warmup: Annotated[int, Option(help="Rounds before them.")] = 1,
    alone: Annotated[bool, Option(help="Also measure compute and exchange alone, for the ceilings.")] = True,
    device: Annotated[str, Option(help="cpu or cuda.")] = "cpu",
    trace: Annotated[Path | None, Option(help="File for a Chrome trace of the last round of the last batch.")] = None,
    as_json: options.Json = False,
) -> None:
    """Attention forward and backward under several plans, in turns. Start it once per rank, as with torchrun."""
    named = read_named(lengths, batches, divide, limit)
    if trace is not None and not trace.absolute().parent.is_dir():
        raise ValueError(f"--trace {trace} is in a folder that doesn't exist: name a file in another")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, not {device!r}")
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
        report, events = bench_attention(named, mask or ["causal"], settings, group)
    finally:
        group.leave()
    if group.rank == 0:
        _print(report, events, trace, as_json)


@app.command()
def planner(
    lengths: options.Lengths = None,
    batches: options.Batches = None,
    mask: options.Masks = None,
    against: Annotated[str, Option(help="What to compare with, with commas between; see the docs.")] = STATIC,
    nodes: options.Nodes = 1,
    devices_per_node: options.DevicesPerNode = 8,
    heads: options.Heads = 8,
    kv_heads: options.KvHeads = 2,
    head_dim: options.HeadDim = 128,
    dtype: options.Dtype = "bf16",
    reduce_dtype: options.ReduceDtype = None,
    block_size: options.BlockSize = "auto",
    head_groups: options.HeadGroups = "auto",
    epsilon: options.Epsilon = None,
    epsilon_inter: options.EpsilonInter = None,
    epsilon_intra: options.EpsilonIntra = None,
    token_tolerance: options.TokenTolerance = None,
    divisions: options.Divisions = None,
    windows: options.Windows = None,
    seed: options.Seed = None,
    backward_kv: options.BackwardKv = None,
    divide: options.Divide = 1,
    limit: options.Limit = None,
    repeats: Annotated[int, Option(help="Plannings that count.")] = 3,
    warmup: Annotated[int, Option(help="Plannings before them.")] = 1,
    as_json: options.Json = False,
) -> None:
    """Plan batches: bytes, balance and CPU seconds, next to static schemes, single solvers, and the bound."""
    named = read_named(lengths, batches, divide, limit)
    config = read_config(
        block_size,
        head_groups,
        epsilon=epsilon,
        epsilon_inter=epsilon_inter,
        epsilon_intra=epsilon_intra,
        token_tolerance=token_tolerance,
        divisions=divisions,
        seed=seed,
        reduce_dtype=reduce_dtype,
        backward_kv=backward_kv,
    )
    shape = read_shape(heads, kv_heads, head_dim, dtype, windows or ["none"])
    from hf_dcp.bench.planner import PlannerSettings, bench_planner
    from hf_dcp.bench.planner_rivals import parse_rivals

    topology = Topology.grid(nodes, devices_per_node)
    settings = PlannerSettings(topology, shape, config, parse_rivals(against), repeats, warmup)
    report = bench_planner(named, mask or ["causal"], settings)
    if as_json:
        print(json.dumps(report))
        return
    from hf_dcp.bench.planner_table import show

    show(report)


def _print(report: dict, events: list, trace: Path | None, as_json: bool) -> None:
    if trace is not None:
        trace.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    if as_json:
        print(json.dumps(report))
        return
    from hf_dcp.bench.table import show

    show(report)
