"""What the recipes share: options, models, the summary with its comparison, errors at set-up."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import models
import torch
from data.text import standard_library, standard_library_tokenizer
from datasets import Dataset, disable_progress_bars
from transformers import (
    AutoModelForSequenceClassification,
    HfArgumentParser,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

import hf_dcp
from hf_dcp.data.sources import open_dataset
from hf_dcp.lookahead.report import PlanReport
from hf_dcp.planning import BatchSpec, ModelShape, Topology, plan_batch

COMPARED_BATCHES = 4


@dataclass
class Options:
    """What every recipe takes besides training arguments."""

    model: str = field(default="tiny", metadata={"help": '"tiny", "smollm2", or a name on the hub or a folder'})
    dataset: str = field(default="", metadata={"help": "a file, a folder, or a name on the hub; default: made offline"})
    split: str = field(default="train", metadata={"help": "split of the data set"})
    max_tokens: int = field(default=2048, metadata={"help": "cut or leave out what is longer than so many tokens"})
    dcp_size: int = field(default=0, metadata={"help": "ranks of a DCP group; 0: all processes"})
    plan_store: str = field(default="", repr=False, metadata={"help": "torch's store, or redis://host:6379/0"})
    compare_nodes: int = field(default=2, metadata={"help": "nodes for which the summary compares DCP with zigzag"})
    compare_devices: int = field(default=4, metadata={"help": "devices of each of these nodes"})
    work_dir: str = field(default="runs/data", metadata={"help": "folder for data and tokenizer made by the recipe"})
    json: bool = field(default=False, metadata={"help": "print the summary as JSON, alone on standard output"})

    def parallelism(self) -> hf_dcp.DcpParallelismConfig:
        return hf_dcp.DcpParallelismConfig(dcp_size=self.dcp_size or world_size(), plan_store=self.plan_store)


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def parse(options: type, arguments: type, argv: Sequence[str], description: str, **defaults: Any) -> tuple[Any, Any]:
    """A recipe's options, and the training arguments of its trainer with the plugin in them."""
    parser = HfArgumentParser(
        (options, arguments), description=description.partition("\n")[0], formatter_class=argparse.HelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.set_defaults(
        **{
            "max_steps": 20,
            "train_sampling_strategy": "sequential",
            "learning_rate": 1e-3,
            "lr_scheduler_type": "linear",
            "warmup_steps": 2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "dataloader_num_workers": 1,  # the planning worker of this rank
            "ddp_find_unused_parameters": False,
            "use_cpu": not cuda,
            "bf16": cuda,
        }
        | defaults
    )
    given = vars(parser.parse_args(list(argv)))
    chosen = options(**{f.name: given.pop(f.name) for f in fields(options)})
    given["parallelism_config"] = chosen.parallelism()
    return chosen, arguments(**given)


def load_model(options: Options, rewards: bool = False) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, with attention by DCP, and its tokenizer.

    Args:
        rewards: with a head that gives a score, in place of one that predicts tokens.
    """
    if options.model == "tiny":
        tokenizer = standard_library_tokenizer(Path(options.work_dir))
        model = models.tiny_llama(tokenizer, 4 * options.max_tokens, "dcp")
    elif options.model == "smollm2":
        model, tokenizer = models.smollm2("dcp"), models.smollm2_tokenizer()
    elif rewards:
        _, tokenizer = models.by_name(options.model, "dcp")
        kind = AutoModelForSequenceClassification
        return kind.from_pretrained(options.model, num_labels=1, attn_implementation="dcp"), tokenizer
    else:
        model, tokenizer = models.by_name(options.model, "dcp")
    if rewards:
        backbone, model.config.num_labels = model.model, 1
        model = LlamaForSequenceClassification._from_config(
            model.config, attn_implementation="dcp", dtype=torch.float32
        )
        model.model.load_state_dict(backbone.state_dict())
    return model, tokenizer


def load_rows(options: Options, offline: Callable[[Path], Dataset], columns: Sequence[str]) -> Dataset:
    """The data set that was asked for, or the one that is made offline.

    Raises:
        ValueError: for a missing column.
    """
    data = open_dataset(options.dataset, options.split) if options.dataset else offline(Path(options.work_dir))
    missing = [name for name in columns if name not in data.column_names]
    if missing:
        raise ValueError(
            f"the data set has no column {', '.join(map(repr, missing))}: it needs {', '.join(columns)}, and has "
            f"{', '.join(data.column_names)}"
        )
    if len(data) == 0:
        raise ValueError("the data set has no rows")
    return data


def offline_texts(work_dir: Path) -> Dataset:
    """Sources of Python's standard library, in the column ``text``."""
    return standard_library(work_dir)


def compare(batches: Sequence[BatchSpec], shape: ModelShape, topology: Topology) -> dict[str, Any]:
    """Bytes and imbalance of attention for some batches: DCP, and zigzag with the same masks.

    Zigzag's tokens lie where static zigzag puts them, and only rows that the mask reads are sent; ``zigzag_dense`` is
    what the static ring sends, which moves every key and value to every rank.
    """
    answer: dict[str, Any] = {"nodes": topology.num_nodes, "devices": topology.world_size, "batches": len(batches)}
    for name, placement in (("dcp", "auto"), ("zigzag", "zigzag")):
        config = hf_dcp.DcpConfig(placement=placement)
        reports = [PlanReport.of(plan_batch(batch, topology, shape, config)) for batch in batches]
        answer[name] = {
            "inter_node_bytes": sum(report.inter_bytes for report in reports),
            "bytes": sum(report.inter_bytes + report.intra_bytes for report in reports),
            "compute_imbalance": max(report.compute_imbalance for report in reports),
            "token_imbalance": max(report.token_imbalance for report in reports),
        }
        answer["zigzag_dense_bytes"] = sum(report.ring_bytes for report in reports)
    return answer


def comparisons(options: Options, batches: Sequence[BatchSpec], shape: ModelShape) -> list[dict[str, Any]]:
    """For the run's own processes, taken as one node, and for the nodes that were asked for."""
    topologies = [Topology.grid(1, world_size()), Topology.grid(options.compare_nodes, options.compare_devices)]
    return [compare(batches, shape, topology) for topology in topologies if topology.world_size > 1]


def show(comparison: dict[str, Any]) -> str:
    """One comparison as text."""
    lines = [f"{comparison['batches']} batches on {comparison['nodes']} node(s), {comparison['devices']} devices:"]
    for name in ("dcp", "zigzag"):
        part = comparison[name]
        lines.append(
            f"  {name:7} {part['bytes'] / 1e6:9.3f} MB sent, {part['inter_node_bytes'] / 1e6:9.3f} MB of it between "
            f"nodes; compute imbalance {part['compute_imbalance']:.2f}, tokens {part['token_imbalance']:.2f}"
        )
    lines.append(f"  a dense ring, whatever the mask: {comparison['zigzag_dense_bytes'] / 1e6:.3f} MB")
    return "\n".join(lines)


def train(trainer: Trainer, options: Options) -> dict[str, Any]:
    """Train, and compare the placements of the first batches; the summary, with the same keys on every rank."""
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    size = trainer.args.per_device_train_batch_size
    data, collator = trainer.train_dataset, trainer.data_collator
    starts = range(0, min(COMPARED_BATCHES * size, len(data)), size)
    read = [collator.read([data[i] for i in range(s, min(s + size, len(data)))]) for s in starts]
    return summary(options, [entry["loss"] for entry in logs], [batch.spec for batch in read], trainer, seconds) | {
        "logs": logs
    }


def summary(
    options: Options, losses: list[float], batches: list[BatchSpec], trainer: Any, seconds: float
) -> dict[str, Any]:
    """What a recipe says at its end.

    Args:
        trainer: or anything with ``args.parallelism_config``.
    """
    shape = trainer.args.parallelism_config.session.shape
    shown = {
        name: value for name, value in asdict(options).items() if name != "plan_store"
    }  # its URL may hold a password
    return {
        "options": shown,
        "world_size": world_size(),
        "steps": len(losses),
        "losses": losses,
        "seconds": seconds,
        "comparisons": comparisons(options, batches, shape) if is_main() else [],
    }


def run(name: str, work: Callable[[Sequence[str]], tuple[Callable[[], dict[str, Any]], Options]]) -> None:
    """Run a recipe: standard output is kept for ``--json`` alone, and set-up errors are one sentence, exit status 2.

    Args:
        work: from arguments to what trains, and the options.
    """
    disable_progress_bars()
    with contextlib.redirect_stdout(sys.stderr):
        with setup_errors(name):
            go, options = work(sys.argv[1:])
        result = go()
        if is_main():
            print(f"{name}: {result['steps']} steps, loss {result['losses'][0]:.4f} -> {result['losses'][-1]:.4f}")
            for comparison in result["comparisons"]:
                print(show(comparison))
    if is_main() and options.json:
        print(json.dumps(result))


@contextlib.contextmanager
def setup_errors(name: str) -> Iterator[None]:
    """A setting or a row that can't be honoured ends the program on every rank."""
    try:
        yield
    except ValueError as error:
        if is_main():
            print(f"{name}: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(5)  # the launcher ends all processes when the first one is gone: let that be the one that speaks
        sys.exit(2)


def trainer_of(options: Options, args: TrainingArguments, model: Any, rows: Any, mask: Any, tokenizer: Any) -> Trainer:
    """A stock Trainer on batches of the group.

    Args:
        rows: with ``input_ids`` and ``length``.
        mask: of each row.
    """
    dcp = options.parallelism() if args.parallelism_config is None else args.parallelism_config
    return Trainer(
        model,
        args,
        train_dataset=dcp.batched(rows, tokens_per_batch=2 * options.max_tokens, seed=args.seed),
        data_collator=dcp.collator(tokenizer, mask=mask),
        processing_class=tokenizer,
        callbacks=[hf_dcp.DcpStatsCallback()],
    )
