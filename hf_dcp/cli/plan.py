"""`hf-dcp plan`: plan one batch and say what it costs, next to the static schemes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_dcp.cli import options
from hf_dcp.cli.inputs import read_batch, read_config, read_shape
from hf_dcp.config import PLACEMENTS, DcpConfig
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.rates import read_hardware

Option = typer.Option


def plan(
    lengths: options.Lengths = None,
    batch: Annotated[Path | None, Option(help="JSON file: a list of lengths, or sequences with masks.")] = None,
    mask: Annotated[str, Option(help="Mask, such as causal, lambda:64,4096, shared:0.2x4.")] = "causal",
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
    hardware: options.Hardware = None,
    placement: Annotated[str | None, Option(help=f"One of {', '.join(PLACEMENTS)}.")] = None,
    save: Annotated[Path | None, Option(help="Folder for the rank plans, as safetensors files.")] = None,
    as_json: options.Json = False,
) -> None:
    """Plan one batch: bytes, balance, predicted times, next to static context parallelism."""
    spec = read_batch(lengths, batch, mask)
    topology = Topology.grid(nodes, devices_per_node)
    shape = read_shape(heads, kv_heads, head_dim, dtype, windows or ["none"])
    config = read_config(
        block_size,
        head_groups,
        epsilon=epsilon,
        epsilon_inter=epsilon_inter,
        epsilon_intra=epsilon_intra,
        token_tolerance=token_tolerance,
        divisions=divisions,
        seed=seed,
        placement=placement,
        reduce_dtype=reduce_dtype,
        hardware=read_hardware(hardware),
    )
    report = measure(spec, topology, shape, config, save)
    if as_json:
        print(json.dumps(report))
    else:
        from hf_dcp.cli.table import show_plan

        show_plan(report)


def measure(
    batch: BatchSpec, topology: Topology, shape: ModelShape, config: DcpConfig, save: Path | None = None
) -> dict[str, Any]:
    """Plan three times: the report of the last, with the medians of the CPU seconds of the last two."""
    began = time.perf_counter()
    from hf_dcp.bench.planner import timed_plan
    from hf_dcp.cli.report import plan_report, static_schemes

    imports_s = time.perf_counter() - began
    timed = timed_plan(batch, topology, shape, config, repeats=2, warmup=1)
    if save is not None:
        save_plans(save, timed.payloads)
    report = plan_report(timed.plan, imports_s + timed.first_s, timed.cpu_s, [len(data) for data in timed.payloads])
    report["baselines"] = static_schemes(timed.plan)
    return report


def save_plans(folder: Path, payloads: list[bytes]) -> None:
    """Write ``rank_00000.safetensors`` and so on. Raises ValueError if the folder can't be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for rank, data in enumerate(payloads):
            (folder / f"rank_{rank:05d}.safetensors").write_bytes(data)
    except OSError as error:
        raise ValueError(f"--save {folder} can't be written ({error.strerror}): name another folder") from error
