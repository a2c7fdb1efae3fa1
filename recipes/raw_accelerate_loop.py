"""A training loop of your own with Accelerate and DCP, without Trainer.

With no arguments and no network it trains a small Llama on the sources of Python's standard library:

    accelerate launch --config_file recipes/cpu_4.yaml recipes/raw_accelerate_loop.py

On your own model and data, with a column of texts:

    accelerate launch --config_file recipes/gpu_8.yaml recipes/raw_accelerate_loop.py --model NAME --dataset my_texts.jsonl \
        --column text --max_tokens 131072 --learning_rate 1e-5 --max_steps 500

Expected output of the first command,
shortened (numbers depend on the sources of your Python):

    step 1: loss 8.3402, grad norm ...
    ...
    raw_accelerate_loop.py: 20 steps, loss 8.3402 -> 6.6126
    ...
    4 batches on 2 node(s), 8 devices:
      dcp       152.446 MB sent,    28.196 MB of it between nodes; compute imbalance 1.10, tokens ...
      zigzag    503.261 MB sent,    71.928 MB of it between nodes; compute imbalance 1.01, tokens ...
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import common
import torch
from accelerate import Accelerator
from data.rows import tokenise
from transformers import HfArgumentParser, set_seed

import hf_dcp


@dataclass
class Options(common.Options):
    column: str = field(default="text", metadata={"help": "column with texts, or with chats (role, content)"})
    mask: str = field(default="causal", metadata={"help": "attention mask, such as causal, lambda:64,4096, window:512"})
    max_steps: int = field(default=20, metadata={"help": "optimiser steps"})
    accumulation: int = field(default=1, metadata={"help": "batches of an optimiser step"})
    learning_rate: float = field(default=1e-3, metadata={"help": "of AdamW"})
    workers: int = field(default=1, metadata={"help": "DataLoader workers of each process, which plan ahead"})
    seed: int = field(default=0, metadata={"help": "of weights and of the order of batches"})


def endless(loader: hf_dcp.DcpDataLoader) -> Iterator[dict[str, Any]]:
    """Epoch after epoch: the loader orders batches anew in each."""
    while True:
        yield from loader


def build(argv: Sequence[str]) -> tuple[Callable[[], dict[str, Any]], Options]:
    parser = HfArgumentParser(Options, description=(__doc__ or "").partition("\n")[0])
    (options,) = parser.parse_args_into_dataclasses(list(argv))
    set_seed(options.seed)
    dcp = options.parallelism()
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        parallelism_config=dcp,
        gradient_accumulation_steps=options.accumulation,
    )
    with accelerator.main_process_first():
        model, tokenizer = common.load_model(options)
        texts = common.load_rows(options, common.offline_texts, (options.column,))
        rows = tokenise(texts, tokenizer, options.column, options.max_tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    loader = hf_dcp.DcpDataLoader(
        rows,
        mask=options.mask,
        config=dcp,
        model=model,
        tokens_per_batch=2 * options.max_tokens,
        accumulation=options.accumulation,
        seed=options.seed,
        device=accelerator.device,
        num_workers=options.workers,
    )
    model, optimizer = accelerator.prepare(model, optimizer)  # not the loader, which deals its batches itself

    def train() -> dict[str, Any]:
        started, losses = time.perf_counter(), []
        batches = endless(loader)
        model.train()
        for step in range(1, options.max_steps + 1):
            total = torch.zeros((), device=accelerator.device)
            for _ in range(options.accumulation):
                with accelerator.accumulate(model):
                    loss = model(**next(batches), use_cache=False).loss
                    # Accelerate divides by the accumulation steps; the loader has counted the labels of all of them
                    accelerator.backward(loss * options.accumulation)
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    total += loss.detach()
            losses.append(float(accelerator.reduce(total, "mean")))
            accelerator.print(f"step {step}: loss {losses[-1]:.4f}, grad norm {float(norm):.3f}")
        seconds = time.perf_counter() - started
        reader = dcp.collator(tokenizer, mask=options.mask)
        firsts = range(min(common.COMPARED_BATCHES, len(loader.dataset)))
        specs = [reader.read([loader.dataset[i]]).spec for i in firsts]
        run = SimpleNamespace(args=SimpleNamespace(parallelism_config=dcp))
        return common.summary(options, losses, specs, run, seconds)

    return train, options


if __name__ == "__main__":
    common.run("raw_accelerate_loop.py", build)
