"""`hf-dcp estimate`: would DCP help on this data, these devices, and this model?"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_dcp.cli.inputs import read_config, read_shape
from hf_dcp.masks import parse_mask
from hf_dcp.planning.batch import Topology
from hf_dcp.planning.simulate import DEFAULT_HARDWARE

if TYPE_CHECKING:
    from hf_dcp.estimate.hardware import Hardware
    from hf_dcp.estimate.lengths import Progress
    from hf_dcp.estimate.model import Model

Option = typer.Option


def estimate(
    dataset: Annotated[str, typer.Argument(help="Name on the hub, folder, file, or lengths such as 4096,512.")],
    column: Annotated[str | None, Option(help="Column with texts, chats, token ids, or numbers of tokens.")] = None,
    split: Annotated[str, Option(help="Split of the data set.")] = "train",
    dataset_config: Annotated[str | None, Option(help="Configuration of a data set on the hub.")] = None,
    rows: Annotated[int, Option(help="At most so many rows are looked at.")] = 10_000,
    model: Annotated[str | None, Option(help="Name on the hub, or folder: tokenizer and sizes are read.")] = None,
    tokenizer: Annotated[str | None, Option(help="Another tokenizer than the model's.")] = None,
    heads: Annotated[int, Option(help="Query heads, where no --model is given.")] = 32,
    kv_heads: Annotated[int, Option(help="KV heads, likewise.")] = 8,
    head_dim: Annotated[int, Option(help="Elements of a head, likewise.")] = 128,
    layers: Annotated[int, Option(help="Layers, likewise.")] = 32,
    parameters: Annotated[float | None, Option(help="Weights, such as 8e9, likewise; default: guessed.")] = None,
    windows: Annotated[list[str] | None, Option(help="Layers by window, such as none:4,4096:20.")] = None,
    dtype: Annotated[str | None, Option(help="Type of Q, K and V; default: bf16, or the model's.")] = None,
    nodes: Annotated[int, Option(help="Nodes of the DCP group.")] = 1,
    devices_per_node: Annotated[int, Option(help="Devices of each node.")] = 8,
    mask: Annotated[str, Option(help="Mask, such as causal, lambda:64,4096, shared:0.2x4.")] = "causal",
    tokens_per_batch: Annotated[int, Option(help="Tokens of a batch of the whole group.")] = 131_072,
    max_length: Annotated[int | None, Option(help="Cut longer rows; default: at --tokens-per-batch.")] = None,
    hardware: Annotated[str, Option(help="Preset, or JSON file of hf-dcp bench calibrate.")] = DEFAULT_HARDWARE,
    calibrate: Annotated[bool, Option("--calibrate", help="Measure attention's rate on this machine.")] = False,
    link_gbps: Annotated[float | None, Option(help="Gbit/s of a device's link between nodes.")] = None,
    intra_gbps: Annotated[float | None, Option(help="Gbit/s of a device's link inside its node.")] = None,
    device_tflops: Annotated[float | None, Option(help="Attained attention TFLOP/s of a device.")] = None,
    batches: Annotated[int, Option(help="Plan at most so many batches.")] = 200,
    seconds: Annotated[float, Option(help="Stop planning further batches after so many seconds.")] = 35.0,
    processes: Annotated[int | None, Option(help="Processes that plan; default: as many as CPUs.")] = None,
    block_size: Annotated[str, Option(help="Tokens of a block, or auto.")] = "auto",
    head_groups: Annotated[str, Option(help="Head groups, or auto.")] = "auto",
    seed: Annotated[int, Option(help="Seed of the sample of rows and batches.")] = 0,
    html: Annotated[Path | None, Option(help="Write the same as an HTML page with plots.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON, alone on standard output.")] = False,
) -> None:
    """Lengths of a data set, and predicted times of DCP and of static schemes: would DCP help?"""
    from hf_dcp.estimate.lengths import read_lengths
    from hf_dcp.estimate.run import Question
    from hf_dcp.estimate.run import estimate as answer

    parse_mask(mask)
    if html is not None and not html.absolute().parent.is_dir():
        raise ValueError(f"--html {html} is in a folder that doesn't exist: name a file in another")
    known = _model(model, heads, kv_heads, head_dim, layers, parameters, windows, dtype)
    question = Question(
        mask=mask,
        model=known,
        topology=Topology.grid(nodes, devices_per_node),
        hardware=_hardware(hardware, calibrate, known, link_gbps, intra_gbps, device_tflops),
        config=read_config(block_size, head_groups),
        tokens_per_batch=tokens_per_batch,
        batches=batches,
        seconds=seconds,
        processes=processes or len(os.sched_getaffinity(0)),
        seed=seed,
    )
    with progress_bar() as progress:
        lengths = read_lengths(dataset, column, split, dataset_config, tokenizer or model, rows, seed, progress)
        result = answer(lengths.cut(max_length or tokens_per_batch), question, progress)
    if html is not None:
        from hf_dcp.estimate.page import write_page

        write_page(result, html)
    if as_json:
        print(json.dumps(result.to_dict()))
        return
    from hf_dcp.estimate.screen import show

    show(result)


def _model(
    name: str | None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    layers: int,
    parameters: float | None,
    windows: list[str] | None,
    dtype: str | None,
) -> Model:
    from hf_dcp.estimate.model import guessed, read_model

    if name is not None:
        return read_model(name, dtype)
    return guessed(read_shape(heads, kv_heads, head_dim, dtype or "bf16", windows or [f"none:{layers}"]), parameters)


def _hardware(name: str, calibrate: bool, model: Model, *given: float | None) -> Hardware:
    from hf_dcp.estimate.hardware import Hardware

    found = Hardware.named(name)
    return (found.calibrated(model.shape) if calibrate else found).with_given(*given)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on standard error for each thing that is being done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, int] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)  # type: ignore[arg-type]

        yield update
