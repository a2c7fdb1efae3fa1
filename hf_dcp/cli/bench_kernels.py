"""`hf-dcp bench kernels`: attention kernels of one device, checked and timed; or compiled for GPUs that are not here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

Option = typer.Option


def kernels(
    device: Annotated[str, Option(help="cuda or cpu.")] = "cuda",
    tokens: Annotated[str, Option(help="Lengths of the sequence, with commas between.")] = "8192,16384,32768,65536",
    mask: Annotated[list[str] | None, Option(help="Mask; repeat it for more. Default: one of four kinds.")] = None,
    heads: Annotated[int, Option(help="Query heads.")] = 32,
    kv_heads: Annotated[int, Option(help="KV heads.")] = 8,
    head_dim: Annotated[int, Option(help="Elements of a head.")] = 128,
    dtype: Annotated[str, Option(help="Type of Q, K and V: bf16 or fp16; on CPUs also fp32.")] = "bf16",
    seconds: Annotated[float, Option(help="Start nothing more after so many seconds.")] = 200.0,
    compile_: Annotated[
        bool, Option("--compile", help="Compile every shipped configuration instead; needs no GPU.")
    ] = False,
    only_defaults: Annotated[bool, Option("--only-defaults", help="With --compile: a part, for a quick look.")] = False,
    tune: Annotated[Path | None, Option(help="Time the shipped tile shapes instead; file for the fastest.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON, alone on standard output.")] = False,
) -> int:
    """Check every kernel against fp64 and time it beside SDPA, FlexAttention and FlashAttention, on one device."""
    if compile_:
        from hf_dcp.bench.compiled import compile_all

        report = compile_all(full=not only_defaults)
        print(json.dumps(report)) if as_json else _print_compiled(report)
        return 0 if report["ok"] else 1
    from hf_dcp.bench.kernels import MASKS, Settings, bench_kernels
    from hf_dcp.cli.inputs import parse_lengths
    from hf_dcp.masks import parse_mask

    _check(device, dtype, heads, kv_heads)
    if tune is not None:
        return _tune(tune, heads, kv_heads, head_dim, dtype, device)
    for one in mask or MASKS:
        parse_mask(one)
    settings = Settings(device, parse_lengths(tokens), tuple(mask or MASKS), heads, kv_heads, head_dim, dtype, seconds)
    report = bench_kernels(settings)
    print(json.dumps(report)) if as_json else _print(report)
    return 0 if report["ok"] else 1


def _check(device: str, dtype: str, heads: int, kv_heads: int) -> None:
    import torch

    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cuda or cpu, not {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA GPU here; write --device cpu, or --compile")
    allowed = ("bf16", "fp16") if device == "cuda" else ("bf16", "fp16", "fp32")
    if dtype not in allowed:
        raise ValueError(f"--dtype must be one of {', '.join(allowed)} on {device}, not {dtype!r}")
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"--kv-heads must divide --heads {heads}, not be {kv_heads}")


def _tune(path: Path, heads: int, kv_heads: int, head_dim: int, dtype: str, device: str) -> int:
    from hf_dcp.bench.tune import tune

    if device != "cuda":
        raise ValueError("--tune needs a GPU: write --device cuda")
    found = tune(heads, kv_heads, head_dim, dtype, device)
    path.write_text(json.dumps(found, indent=1))
    for entry in found:
        print(f"{entry['kernel']}: {entry['shape']} of {entry['ms']}")
    return 0


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    out = Console()
    wrong = [check for check in report["checks"] if not check["ok"]]
    out.print(f"{report['device']}, {report['versions']}")
    out.print(f"matmul: {report['matmul_tflops']:.1f} TFLOP/s; {len(report['checks'])} checks, {len(wrong)} failed")
    for check in wrong:
        out.print(f"failed: {check}")
    table = Table(title="attention over one sequence")
    for name in ("tokens", "mask", "kernel", "pass", "ms", "TFLOP/s", "of matmul"):
        table.add_column(name, no_wrap=True)
    for row in report["times"]:
        figures = (
            (f"{row['ms']:.2f}", f"{row['tflops']:.1f}", f"{row['of_matmul']:.0%}")
            if "ms" in row
            else (row["skipped"], "", "")
        )
        table.add_row(str(row["tokens"]), row["mask"], row.get("kernel", ""), row.get("pass", ""), *figures)
    out.print(table)


def _print_compiled(report: dict[str, Any]) -> None:
    print("| kernel | GPU | registers | shared memory, bytes | spilled, bytes |\n|---|---|---|---|---|")
    for row in report["compiled"]:
        name = f"{row['variant']} | sm_{row['capability']}"
        print(f"| {name} | {row['registers']} | {row['shared']:,} | {row['spilled']} |")
    for text in report["problems"]:
        print(text)
