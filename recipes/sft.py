"""Fine-tune any causal language model on long, unequal texts with Dynamic Context Parallelism.

With no arguments and no network it trains a small Llama on the sources of Python's standard library:

    accelerate launch --config_file recipes/cpu_4.yaml recipes/sft.py --mask causal

On your own model and data, on the GPUs of one machine:

    accelerate launch --config_file recipes/gpu_8.yaml recipes/sft.py --model NAME --dataset NAME --column text \
        --max_length 131072 --tokens_per_batch 131072 --bf16 --learning_rate 1e-5 --max_steps 200

Besides its own options (see `Recipe`) it takes all of Transformers' `TrainingArguments`. Expected output of the first
command, shortened (the loss of a random model starts near ln 4096 = 8.3):

    hf_dcp: group of 4 ranks on 1 node ...
    {'loss': 8.36, ...}
    ...
    saved runs/sft; it continues "import os\n" with ...
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import models
import torch
from data.dense import DenseCollator
from data.rows import open_dataset, tokenise
from data.text import standard_library, standard_library_tokenizer
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import hf_dcp
from hf_dcp.masks import parse_mask
from hf_dcp.planning import BatchSpec, ModelShape, Topology, plan_batch
from hf_dcp.rates import DEFAULT_HARDWARE, read_hardware


@dataclass
class Recipe:
    """What this recipe takes besides `TrainingArguments`."""

    model: str = field(default="tiny", metadata={"help": '"tiny", "smollm2", or a name on the hub or a folder'})
    dataset: str = field(default="stdlib", metadata={"help": '"stdlib", a file, a folder, or a name on the hub'})
    dataset_config: str | None = field(default=None, metadata={"help": "configuration of a data set on the hub"})
    split: str = field(default="train", metadata={"help": "split of the data set"})
    column: str = field(default="text", metadata={"help": "column with texts, or with chats (role, content)"})
    mask: str = field(default="causal", metadata={"help": "attention mask, such as causal, lambda:64,4096, window:512"})
    max_length: int = field(default=8192, metadata={"help": "cut longer rows at so many tokens"})
    tokens_per_batch: int = field(default=16384, metadata={"help": "tokens of one batch of the whole DCP group"})
    dcp_size: int = field(default=0, metadata={"help": "ranks of a DCP group; 0: all processes"})
    block_size: str = field(default="auto", metadata={"help": "tokens of a block, or auto"})
    epsilon: str = field(
        default="0.1", metadata={"help": "allowed compute imbalance, or auto: by predicted time, with measured rates"}
    )
    hardware: str = field(
        default=DEFAULT_HARDWARE,
        metadata={
            "help": "how fast devices and links are: a preset, or a file that hf-dcp bench calibrate --save has written"
        },
    )
    plan_store: str = field(
        default="",
        repr=False,
        metadata={
            "help": "where plans are exchanged: torch's store, or redis://host:6379/0; a password is better given in "
            "HF_DCP_REDIS_PASSWORD"
        },
    )
    lookahead: int | None = field(default=None, metadata={"help": "batches to plan ahead; default: what workers make"})
    attention: str = field(default="dcp", metadata={"help": "dcp, or sdpa: one process with dense masks, to compare"})
    work_dir: str = field(default="runs/data", metadata={"help": "folder for data and tokenizer made by the recipe"})
    dcp_trace: str = field(default="", metadata={"help": "JSON file for a Chrome trace of steps 3 to 5 of all ranks"})
    json: bool = field(default=False, metadata={"help": "print a summary as JSON, alone on standard output"})

    def __post_init__(self) -> None:
        if self.attention not in ("dcp", "sdpa"):
            raise ValueError(f'attention must be "dcp" or "sdpa", not {self.attention!r}')
        if self.attention == "sdpa" and world_size() > 1:
            raise ValueError("attention sdpa is for comparison and runs in one process: start one, or use dcp")
        if self.block_size != "auto" and not self.block_size.isdecimal():
            raise ValueError(f'block_size must be an integer of at least 1 or "auto", not {self.block_size!r}')

    def parallelism(self) -> hf_dcp.DcpParallelismConfig:
        config = hf_dcp.DcpConfig(
            block_size="auto" if self.block_size == "auto" else int(self.block_size),
            epsilon=number_or_text(self.epsilon),  # type: ignore[arg-type]
            hardware=read_hardware(self.hardware) or DEFAULT_HARDWARE,
        )
        return hf_dcp.DcpParallelismConfig(
            dcp_size=self.dcp_size or world_size(), dcp=config, plan_store=self.plan_store, lookahead=self.lookahead
        )

    def shown(self) -> dict[str, Any]:
        """The settings without the plan store, whose URL may hold a password."""
        return {name: value for name, value in asdict(self).items() if name != "plan_store"}


def number_or_text(text: str) -> float | str:
    """`DcpConfig` says what is wrong with a text."""
    try:
        return float(text)
    except ValueError:
        return text


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def parse(argv: list[str]) -> tuple[Recipe, TrainingArguments, hf_dcp.DcpParallelismConfig]:
    """Own options and training arguments, with defaults that suit a first run."""
    parser = HfArgumentParser((Recipe, TrainingArguments), description=(__doc__ or "").partition("\n")[0])
    parser.set_defaults(
        output_dir="runs/sft",
        max_steps=30,
        per_device_train_batch_size=1,  # an item of the data set is a whole batch
        per_device_eval_batch_size=1,
        train_sampling_strategy="sequential",  # the order of batches is the data set's affair
        learning_rate=None,
        lr_scheduler_type="linear",
        warmup_steps=3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        dataloader_num_workers=1,  # the planning worker of this rank
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
    )
    given = vars(parser.parse_args(argv))
    recipe = Recipe(**{f.name: given.pop(f.name) for f in fields(Recipe)})
    if given["learning_rate"] is None:
        given["learning_rate"] = 1e-3 if recipe.model == "tiny" else 2e-5
    parallelism = recipe.parallelism()
    if recipe.attention == "dcp":
        given["parallelism_config"] = parallelism
    return recipe, TrainingArguments(**given), parallelism


def load(recipe: Recipe) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Dataset]:
    """Model, tokenizer, and rows of ``input_ids`` and ``length``."""
    work_dir = Path(recipe.work_dir)
    if recipe.model == "tiny":
        tokenizer = standard_library_tokenizer(work_dir)
        model = models.tiny_llama(tokenizer, recipe.max_length, recipe.attention)
    elif recipe.model == "smollm2":
        tokenizer = models.smollm2_tokenizer()
        model = models.smollm2(recipe.attention)
    else:
        model, tokenizer = models.by_name(recipe.model, recipe.attention)
    if recipe.dataset == "stdlib":
        texts = standard_library(work_dir)
    else:
        texts = open_dataset(recipe.dataset, recipe.split, recipe.dataset_config)
    return model, tokenizer, tokenise(texts, tokenizer, recipe.column, recipe.max_length)


def build(recipe: Recipe, args: TrainingArguments, parallelism: hf_dcp.DcpParallelismConfig) -> Trainer:
    """A stock Trainer on batches of the group."""
    set_seed(args.seed)
    with args.main_process_first(desc="data"):
        model, tokenizer, rows = load(recipe)
        batches = parallelism.batched(rows, tokens_per_batch=recipe.tokens_per_batch, seed=args.seed)
        compile_planner([row["length"] for row in batches[0]], recipe.mask)
    dense = recipe.attention == "sdpa"
    watching: list[TrainerCallback] = [] if dense else [hf_dcp.DcpStatsCallback()]
    if recipe.dcp_trace:
        watching.append(hf_dcp.DcpTraceCallback(recipe.dcp_trace))
    return Trainer(
        model,
        args,
        train_dataset=batches,
        data_collator=DenseCollator(recipe.mask) if dense else parallelism.collator(tokenizer, mask=recipe.mask),
        processing_class=tokenizer,
        callbacks=watching,
    )


def compile_planner(lengths: list[int], mask: str) -> None:
    """Plan once, for any model: numba compiles the planner on a machine's first plan, most of a minute of CPU, and the other
    processes then find the compiled code in its cache."""
    plan_batch(BatchSpec(lengths, parse_mask(mask)), Topology.grid(1, world_size()), ModelShape(4, 2, 64, "fp32"))


def train(trainer: Trainer, recipe: Recipe) -> dict[str, Any]:
    """Train, save, load what was saved, continue a text with it; return the summary (the same keys on every rank)."""
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    trainer.save_model()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    watching = [cb for cb in trainer.callback_handler.callbacks if isinstance(cb, hf_dcp.DcpStatsCallback)]
    return {
        "recipe": recipe.shown(),
        "world_size": world_size(),
        "parameters": trainer.model.num_parameters(),
        "steps": trainer.state.global_step,
        "losses": losses,
        "seconds": seconds,
        "statistics": watching[0].summary() if watching else {},
        "waits_s": [wait for wait, _ in watching[0].total.steps] if watching else [],
        "periods_s": [period for _, period in watching[0].total.steps] if watching else [],
        "output_dir": trainer.args.output_dir,
    }


def continuation(folder: str, prompt: str) -> str:
    """What the saved model writes behind ``prompt``: proof that ``from_pretrained`` and ``generate`` work on it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    set_seed(0)
    written = model.generate(**tokens, max_new_tokens=24, do_sample=True, top_k=20)
    return tokenizer.decode(written[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)


@contextlib.contextmanager
def setup_errors() -> Iterator[None]:
    """A setting that can't be honoured ends the program on every rank: one sentence, exit status 2."""
    try:
        yield
    except ValueError as error:
        if is_main():
            print(f"sft.py: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(5)  # the launcher ends all processes when the first one is gone: let that be the one that speaks
        sys.exit(2)


def main() -> None:
    # Standard output is kept for --json alone: Trainer's own prints go to standard error.
    with contextlib.redirect_stdout(sys.stderr):
        with setup_errors():
            recipe, args, parallelism = parse(sys.argv[1:])
            trainer = build(recipe, args, parallelism)
        summary = train(trainer, recipe)
        if is_main():
            prompt = "import os\n"
            summary["continuation"] = continuation(args.output_dir, prompt)
            print(f"saved {args.output_dir}; it continues {prompt!r} with {summary['continuation']!r}")
    if is_main() and recipe.json:
        print(json.dumps(summary))


if __name__ == "__main__":
    main()
