"""Many-shot in-context learning under a causal-blockwise mask.

Each row holds many examples and a test example; an example sees the first ones and those before it in a window, the test
example sees all. With no arguments and no network the task is to name the folder of a function of Python's standard
library from its first line:

    accelerate launch --config_file recipes/cpu_4.yaml recipes/icl_blockwise.py

On your own model and data, columns ``examples`` (a list of ``{"input", "output"}``) and ``test`` (one of them):

    accelerate launch --config_file recipes/gpu_8.yaml recipes/icl_blockwise.py --model NAME --dataset shots.jsonl \
        --max_tokens 65536 --block 256 --window_blocks 2 --sink_blocks 1 --learning_rate 1e-5

``--aligned examples`` lets blocks begin where examples do (``--block`` then counts examples). Besides its own options it
takes all of Transformers' `TrainingArguments`. Expected output of the first command,
shortened (numbers depend on the sources of your Python):

    {'loss': '8.242', ..., 'dcp/tokens': ...}
    ...
    icl_blockwise.py: 20 steps, loss 8.2422 -> 2.4058
    ...
    4 batches on 2 node(s), 8 devices:
      dcp        27.282 MB sent,     1.955 MB of it between nodes; compute imbalance 1.10, tokens ...
      zigzag    236.003 MB sent,    55.241 MB of it between nodes; compute imbalance 1.92, tokens ...
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
from data.text import standard_library
from datasets import Dataset
from transformers import TrainingArguments, set_seed

from hf_dcp.data.icl import blocks_of_examples, blocks_of_tokens, icl_row

FOLDERS = 8


@dataclass
class Options(common.Options):
    aligned: str = field(default="tokens", metadata={"help": "blocks of so many tokens, or of so many examples"})
    block: int = field(default=64, metadata={"help": "tokens, or examples, of a block"})
    window_blocks: int = field(default=2, metadata={"help": "an example sees so many blocks, its own included"})
    sink_blocks: int = field(default=1, metadata={"help": "and so many first blocks"})
    labels: str = field(default="all", metadata={"help": "train on the answers of all examples, or of the test"})
    shots: int = field(default=60, metadata={"help": "examples of a row that is made offline"})

    def __post_init__(self) -> None:
        if self.aligned not in ("tokens", "examples"):
            raise ValueError(f'aligned must be "tokens" or "examples", not {self.aligned!r}')
        if self.labels not in ("all", "test"):
            raise ValueError(f'labels must be "all" or "test", not {self.labels!r}')

    def mask(self) -> Callable[[dict[str, Any]], Any]:
        sizes: dict[str, Any] = {"window_blocks": self.window_blocks, "sink_blocks": self.sink_blocks}
        if self.aligned == "tokens":
            return functools.partial(blocks_of_tokens, block=self.block, **sizes)
        return functools.partial(blocks_of_examples, examples_per_block=self.block, **sizes)


def folders_of_functions(work_dir: Path, rows: int, shots: int) -> Dataset:
    """First lines of functions, and the folder of the standard library that each is from."""
    files = standard_library(work_dir)
    lines: dict[str, list[str]] = {}
    for path, text in zip(files["path"], files["text"]):
        folder, slash, _ = path.partition("/")
        if slash:
            lines.setdefault(folder, []).extend(t.strip() for t in text.splitlines() if t.strip().startswith("def "))
    folders = sorted(lines, key=lambda name: (-len(lines[name]), name))[:FOLDERS]
    draw = random.Random(0)

    def example() -> dict[str, str]:
        folder = draw.choice(folders)
        return {"input": draw.choice(lines[folder]), "output": folder}

    return Dataset.from_list([{"examples": [example() for _ in range(shots)], "test": example()} for _ in range(rows)])


def tokens_of(example: dict[str, str], tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids of an example's input and of its output."""
    given, answer = (tokenizer(text)["input_ids"] for text in (f"{example['input']} ->", f" {example['output']}\n"))
    return given, answer


def build(argv: Sequence[str]) -> tuple[Callable[[], dict[str, Any]], Options]:
    options, args = common.parse(
        Options, TrainingArguments, argv, __doc__ or "", output_dir="runs/icl", per_device_train_batch_size=1
    )
    set_seed(args.seed)
    with args.main_process_first(desc="data"):
        model, tokenizer = common.load_model(options)
        made = functools.partial(folders_of_functions, rows=64, shots=options.shots)
        data = common.load_rows(options, made, ("examples", "test"))
        rows = []
        for number, row in enumerate(data):
            shots = [tokens_of(example, tokenizer) for example in row["examples"]]
            test = tokens_of(row["test"], tokenizer)
            rows.append(icl_row(shots, test, options.labels, options.max_tokens, number))  # type: ignore[arg-type]
    trainer = common.trainer_of(options, args, model, rows, options.mask(), tokenizer)
    return lambda: common.train(trainer, options), options


if __name__ == "__main__":
    common.run("icl_blockwise.py", build)
