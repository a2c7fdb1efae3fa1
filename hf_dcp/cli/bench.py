"""`hf-dcp bench`: measure plans on this machine, or on all that a launcher has started it on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hf_dcp.cli import options
from hf_dcp.cli.bench_kernels import kernels
from hf_dcp.cli.inputs import read_config, read_named, read_shape
from hf_dcp.planning.batch import Topology
from hf_dcp.rates import DEFAULT_HARDWARE, Rates, find_rates, read_hardware

Option = typer.Option
app = typer.Typer(help="Measure plans side by side.")
app.command()(kernels)
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


@app.command()
def calibrate(
    nodes: Annotated[int | None, Option(help="As if ranks were on so many nodes; default: as launched.")] = None,
    heads: options.Heads = 8,
    kv_heads: options.KvHeads = 2,
    head_dim: options.HeadDim = 128,
    dtype: options.Dtype = "bf16",
    tokens: Annotated[int, Option(help="Tokens of the sequence whose attention is timed.")] = 4096,
    message_bytes: Annotated[int, Option(help="Bytes of the messages whose rate is measured.")] = 1 << 24,
    repeats: Annotated[int, Option(help="Calls and messages that count.")] = 5,
    hardware: options.Hardware = None,
    device: Annotated[str, Option(help="cpu or cuda.")] = "cpu",
    save: Annotated[Path | None, Option(help="JSON file for the rates, for --hardware of other commands.")] = None,
    as_json: options.Json = False,
) -> None:
    """Measure the rates that predictions use: attention, its overheads, links. Start it once per rank, as with torchrun.

    Links that there are none of keep the rates of --hardware.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, not {device!r}")
    if save is not None and not save.absolute().parent.is_dir():
        raise ValueError(f"--save {save} is in a folder that doesn't exist: name a file in another")
    shape = read_shape(heads, kv_heads, head_dim, dtype, ["none"])
    assumed = find_rates(read_hardware(hardware) or DEFAULT_HARDWARE)
    from hf_dcp.bench.calibrate import CalibrationSettings
    from hf_dcp.bench.calibrate import calibrate as measure
    from hf_dcp.bench.group import Group

    settings = CalibrationSettings(shape, tokens, message_bytes, repeats, assumed)
    group = Group.join(device, nodes)
    try:
        report = measure(settings, group)
    finally:
        group.leave()
    if group.rank != 0:
        return
    if save is not None:
        Rates(**report["rates"]).write(save)
    if as_json:
        print(json.dumps(report))
        return
    for name, value in report["rates"].items():
        print(f"{name:16} {value:12.4g}{'  (assumed)' if name in report['assumed'] else ''}")
    print(f"backward takes {report['backward_over_forward']:.2f} times as long as forward")


def _print(report: dict, events: list, trace: Path | None, as_json: bool) -> None:
    if trace is not None:
        trace.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    if as_json:
        print(json.dumps(report))
        return
    from hf_dcp.bench.table import show

    show(report)
