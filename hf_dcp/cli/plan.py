"""`hf-dcp plan`: plan one batch and say what it costs, next to the static schemes."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_dcp.cli.inputs import read_batch, read_config, read_shape
from hf_dcp.config import PLACEMENTS, DcpConfig
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.plan import Plan

RUNS = 3
Option = typer.Option


def plan(
    lengths: Annotated[str | None, Option(help="Tokens of each sequence, such as 131072,2048.")] = None,
    batch: Annotated[Path | None, Option(help="JSON file: a list of lengths, or sequences with masks.")] = None,
    mask: Annotated[str, Option(help="Mask, such as causal, lambda:64,4096, shared:0.2x4.")] = "causal",
    nodes: Annotated[int, Option(help="Nodes of the DCP group.")] = 1,
    devices_per_node: Annotated[int, Option(help="Devices of each node.")] = 8,
    heads: Annotated[int, Option(help="Query heads.")] = 8,
    kv_heads: Annotated[int, Option(help="KV heads.")] = 2,
    head_dim: Annotated[int, Option(help="Elements of a head.")] = 128,
    dtype: Annotated[str, Option(help="Type of Q, K and V: bf16, fp16, fp32 or fp64.")] = "bf16",
    reduce_dtype: Annotated[str | None, Option(help="Type of partial results on the wire; default: --dtype.")] = None,
    block_size: Annotated[str, Option(help="Tokens of a block, or auto.")] = "auto",
    head_groups: Annotated[str, Option(help="Head groups, or auto.")] = "auto",
    epsilon: Annotated[float | None, Option(help="Allowed compute imbalance.")] = None,
    epsilon_inter: Annotated[float | None, Option(help="Allowed compute imbalance between nodes.")] = None,
    epsilon_intra: Annotated[float | None, Option(help="Allowed compute imbalance inside a node.")] = None,
    token_tolerance: Annotated[float | None, Option(help="Allowed token imbalance.")] = None,
    divisions: Annotated[int | None, Option(help="At most so many divisions per attention call.")] = None,
    windows: Annotated[list[str] | None, Option(help="Layers by window, such as none:4,4096:20.")] = None,
    seed: Annotated[int | None, Option(help="Seed of the planner.")] = None,
    placement: Annotated[str | None, Option(help=f"One of {', '.join(PLACEMENTS)}.")] = None,
    save: Annotated[Path | None, Option(help="Folder for the rank plans, as safetensors files.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON, alone on standard output.")] = False,
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
    from hf_dcp.planning.planner import plan_batch

    started = time.perf_counter()
    runs = []
    for run in range(RUNS):
        result = plan_batch(batch, topology, shape, config)
        before = time.process_time()
        payloads = [rank_plan.to_bytes() for rank_plan in result.rank_plans]
        runs.append(cpu_seconds(result, time.process_time() - before))
        if run == 0:
            cold_s = time.perf_counter() - started
    if save is not None:
        save_plans(save, payloads)
    from hf_dcp.cli.report import plan_report, static_schemes

    cpu_s = {part: statistics.median(run[part] for run in runs[1:]) for part in runs[0]}
    report = plan_report(result, cold_s, cpu_s, [len(data) for data in payloads])
    report["baselines"] = static_schemes(result)
    return report


def cpu_seconds(plan: Plan, serialise: float) -> dict[str, float]:
    """CPU seconds by part. Placement also makes tiles, for every block size that it tries: those of the chosen one are
    timed apart and taken out."""
    from hf_dcp.planning.tiles import make_tiles

    parts = {"tiles": 0.0, **plan.cpu_s}
    if "tiles" not in plan.cpu_s:
        before = time.process_time()
        for window, _ in plan.shape.windows:
            make_tiles(plan.batch, plan.blocks, window)
        parts["tiles"] = min(time.process_time() - before, parts["placement"])
        parts["placement"] -= parts["tiles"]
    parts["serialise"] += serialise
    return {**parts, "total": sum(parts.values())}


def save_plans(folder: Path, payloads: list[bytes]) -> None:
    """Write ``rank_00000.safetensors`` and so on. Raises ValueError if the folder can't be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for rank, data in enumerate(payloads):
            (folder / f"rank_{rank:05d}.safetensors").write_bytes(data)
    except OSError as error:
        raise ValueError(f"--save {folder} can't be written ({error.strerror}): name another folder") from error
