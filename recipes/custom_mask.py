"""A mask of your own: a function from a row to ranges. Here, Python code by its definitions.

A token sees what stands before the first definition of its file (imports, constants), and its own top-level function or
class up to itself; other definitions it doesn't see. `ranges_of` below is all there is to write. With no arguments and no
network it trains a small Llama on the sources of Python's standard library:

    accelerate launch --config_file recipes/cpu_4.yaml recipes/custom_mask.py

On your own model and data, with a column of Python sources:

    accelerate launch --config_file recipes/gpu_8.yaml recipes/custom_mask.py --model NAME --dataset code.jsonl \
        --column text --max_tokens 65536 --learning_rate 1e-5 --max_steps 500

Besides its own options it takes all of Transformers' `TrainingArguments`. Expected output of the first command,
shortened (numbers depend on the sources of your Python):

    {'loss': '8.341', ..., 'dcp/tokens': ...}
    ...
    custom_mask.py: 20 steps, loss 8.3407 -> 6.8162
    ...
    4 batches on 2 node(s), 8 devices:
      dcp       141.593 MB sent,    28.599 MB of it between nodes; compute imbalance 1.10, tokens ...
      zigzag    403.728 MB sent,    57.324 MB of it between nodes; compute imbalance 1.12, tokens ...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import common
import numpy as np
from transformers import TrainingArguments, set_seed

DEFINITION = re.compile(r"^(?:@|def |class |async def )", re.MULTILINE)


@dataclass
class Options(common.Options):
    column: str = field(default="text", metadata={"help": "column with Python sources"})


def ranges_of(row: dict[str, Any]) -> np.ndarray:
    """Which tokens each token sees: int[tokens, 2, 2], two half-open ranges for each.

    Args:
        row: of the data set; ``starts`` are the tokens with which definitions begin, ascending.
    """
    i = np.arange(len(row["input_ids"]))
    starts = np.array([0, *row["starts"]])
    preamble = starts[1] if len(starts) > 1 else len(i)  # everything before the first definition
    own = starts[np.searchsorted(starts, i, side="right") - 1]
    return np.stack([np.stack([0 * i, np.minimum(preamble, i + 1)], 1), np.stack([own, i + 1], 1)], 1)


def row_of(text: str, tokenizer: Any, max_tokens: int) -> dict[str, Any]:
    """Tokens of a source, and with which of them definitions begin. A tokenizer that gives offsets is needed."""
    encoded = tokenizer(text, return_offsets_mapping=True, truncation=True, max_length=max_tokens)
    begins = np.array([start for start, _ in encoded["offset_mapping"]], np.int64)
    found = np.array([match.start() for match in DEFINITION.finditer(text)], np.int64)
    starts = np.unique(np.searchsorted(begins, found))
    ids = encoded["input_ids"]
    return {"input_ids": ids, "length": len(ids), "starts": starts[(starts > 0) & (starts < len(ids))].tolist()}


def build(argv: Sequence[str]) -> tuple[Callable[[], dict[str, Any]], Options]:
    options, args = common.parse(
        Options, TrainingArguments, argv, __doc__ or "", output_dir="runs/custom", per_device_train_batch_size=1
    )
    set_seed(args.seed)
    with args.main_process_first(desc="data"):
        model, tokenizer = common.load_model(options)
        texts = common.load_rows(options, common.offline_texts, (options.column,))
        rows = [row_of(text, tokenizer, options.max_tokens) for text in texts[options.column] if text]
    trainer = common.trainer_of(options, args, model, [row for row in rows if row["length"]], ranges_of, tokenizer)
    return lambda: common.train(trainer, options), options


if __name__ == "__main__":
    common.run("custom_mask.py", build)
