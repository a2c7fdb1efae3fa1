"""Continued pre-training on long text under a lambda mask: the first tokens and a window of the last ones.

With no arguments and no network it trains a small Llama on the sources of Python's standard library:

    accelerate launch --config_file recipes/cpu_4.yaml recipes/long_context_lambda.py

On your own model and data, with a column of texts:

    accelerate launch --config_file recipes/gpu_8.yaml recipes/long_context_lambda.py --model NAME --dataset books.jsonl \
        --column text --max_tokens 131072 --sink 64 --window 4096 --learning_rate 1e-5 --max_steps 500

``--documents`` packs texts into rows of ``--max_tokens`` tokens, each of which sees itself alone, by its own lambda mask.
Besides its own options it takes all of Transformers' `TrainingArguments`. Expected output of the first command,
shortened (numbers depend on the sources of your Python):

    {'loss': '8.346', ..., 'dcp/tokens': ...}
    ...
    long_context_lambda.py: 20 steps, loss 8.3460 -> 6.7933
    ...
    4 batches on 2 node(s), 8 devices:
      dcp        41.112 MB sent,     1.665 MB of it between nodes; compute imbalance 1.10, tokens ...
      zigzag    198.334 MB sent,    29.755 MB of it between nodes; compute imbalance 1.08, tokens ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import common
from data.rows import tokenise
from datasets import Dataset
from transformers import TrainingArguments, set_seed

from hf_dcp import Mask, documents, lambda_mask


@dataclass
class Options(common.Options):
    column: str = field(default="text", metadata={"help": "column with texts, or with chats (role, content)"})
    sink: int = field(default=16, metadata={"help": "first tokens that every token sees"})
    window: int = field(default=256, metadata={"help": "last tokens that every token sees, itself included"})
    documents: bool = field(default=False, metadata={"help": "pack several texts into a row, as documents"})


def mask_of_documents(row: dict[str, Any], inner: Mask) -> Mask:
    return documents(row["document_lengths"], inner)


def packed(rows: Dataset, max_tokens: int) -> Iterator[dict[str, Any]]:
    """Rows of up to ``max_tokens`` tokens with several documents each, in the order of the data set."""
    ids: list[int] = []
    lengths: list[int] = []
    for row in rows:
        if ids and len(ids) + row["length"] > max_tokens:
            yield {"input_ids": ids, "length": len(ids), "document_lengths": lengths}
            ids, lengths = [], []
        ids, lengths = ids + row["input_ids"], lengths + [row["length"]]
    if ids:
        yield {"input_ids": ids, "length": len(ids), "document_lengths": lengths}


def build(argv: Sequence[str]) -> tuple[Callable[[], dict[str, Any]], Options]:
    options, args = common.parse(
        Options, TrainingArguments, argv, __doc__ or "", output_dir="runs/lambda", per_device_train_batch_size=1
    )
    set_seed(args.seed)
    inner = lambda_mask(options.sink, options.window)
    with args.main_process_first(desc="data"):
        model, tokenizer = common.load_model(options)
        texts = common.load_rows(options, common.offline_texts, (options.column,))
        rows: Any = tokenise(texts, tokenizer, options.column, options.max_tokens)
    mask: Any = inner
    if options.documents:
        rows = list(packed(rows, options.max_tokens))
        mask = functools.partial(mask_of_documents, inner=inner)
    trainer = common.trainer_of(options, args, model, rows, mask, tokenizer)
    return lambda: common.train(trainer, options), options


if __name__ == "__main__":
    common.run("long_context_lambda.py", build)
