"""`hf-dcp view`: a picture of a plan, and a page to click through."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from hf_dcp.cli import options
from hf_dcp.cli.inputs import parse_windows, read_batch, read_config, read_shape
from hf_dcp.planning.batch import Topology
from hf_dcp.rates import DEFAULT_HARDWARE, find_rates, read_hardware

Option = typer.Option
PICTURES = (".png", ".svg", ".pdf")


def view(
    plan: Annotated[Path | None, typer.Argument(help="Folder that hf-dcp plan --save has written.")] = None,
    lengths: options.Lengths = None,
    batch: Annotated[Path | None, Option(help="JSON file: a list of lengths, or sequences with masks.")] = None,
    mask: Annotated[str, Option(help="Mask, such as causal, lambda:64,4096, shared:0.2x4.")] = "causal",
    nodes: options.Nodes = 1,
    devices_per_node: options.DevicesPerNode = 8,
    heads: options.Heads = 8,
    kv_heads: options.KvHeads = 2,
    head_dim: options.HeadDim = 128,
    dtype: options.Dtype = "bf16",
    block_size: options.BlockSize = "auto",
    head_groups: options.HeadGroups = "auto",
    divisions: options.Divisions = None,
    placement: Annotated[str | None, Option(help="auto, or a static scheme or solver by name.")] = None,
    windows: options.Windows = None,
    window: Annotated[str | None, Option(help="Which of the plan's windows to show, or none.")] = None,
    hardware: options.Hardware = None,
    out: Annotated[list[Path] | None, Option(help="File to write: .html, .png or .svg; repeat for more.")] = None,
    open_it: Annotated[bool, Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Draw a plan: who computes what, what is sent where, and when."""
    files = out or [Path("plan.html")]
    _check(files, plan, lengths, batch)
    rates = find_rates(read_hardware(hardware) or DEFAULT_HARDWARE)
    from hf_dcp.view.scene import make_scene, read_plans

    if plan is not None:
        plans, bounds = read_plans(plan), None
    else:
        from hf_dcp.planning.planner import plan_batch

        spec = read_batch(lengths, batch, mask)
        shape = read_shape(heads, kv_heads, head_dim, dtype, windows or ["none"])
        config = read_config(block_size, head_groups, divisions=divisions, placement=placement)
        made = plan_batch(spec, Topology.grid(nodes, devices_per_node), shape, config)
        plans, bounds = list(made.rank_plans), spec.lengths
    chosen = plans[0].windows[0].window if window is None else parse_windows([window])[0][0]
    scene = make_scene(plans, rates, chosen, bounds)
    for file in files:
        if file.suffix == ".html":
            from hf_dcp.view.page import page

            file.write_text(page(scene), "utf-8")
        else:
            from hf_dcp.view.picture import draw

            draw(scene, file)
        print(f"wrote {file}")
    pages = [file for file in files if file.suffix == ".html"]
    if open_it and pages:
        webbrowser.open(pages[0].absolute().as_uri())


def _check(files: list[Path], plan: Path | None, lengths: str | None, batch: Path | None) -> None:
    if plan is not None and (lengths is not None or batch is not None):
        raise ValueError("give either a folder of rank plans, or --lengths, or --batch")
    if plan is None and lengths is None and batch is None:
        raise ValueError("give a folder that hf-dcp plan --save has written, or --lengths, such as --lengths 4096,512")
    for file in files:
        if file.suffix not in (".html", *PICTURES):
            raise ValueError(f"--out {file} must end in .html, {', '.join(PICTURES[:-1])} or {PICTURES[-1]}")
        if not file.absolute().parent.is_dir():
            raise ValueError(f"--out {file} is in a folder that doesn't exist: name a file in another")
