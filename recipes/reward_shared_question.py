"""A reward model with stock TRL, each question computed once for all of its ranked answers.

With no arguments and no network it trains a small Llama on functions of Python's standard library and four ranked one-line
descriptions of each:

    accelerate launch --config_file recipes/cpu_4.yaml recipes/reward_shared_question.py

On your own model and data, columns ``question`` and ``answers`` (the best first), or ``chosen`` and ``rejected``:

    accelerate launch --config_file recipes/gpu_8.yaml recipes/reward_shared_question.py --model NAME --dataset pairs.jsonl \
        --max_tokens 32768 --learning_rate 1e-5 --max_steps 500

Besides its own options it takes all of TRL's `RewardConfig`. Expected output of the first command,
shortened (numbers depend on the sources of your Python):

    {'loss': '0.6536', ..., 'accuracy': ..., 'margin': ..., 'dcp/tokens': ...}
    ...
    reward_shared_question.py: 20 steps, loss 0.6536 -> 0.3959
    ...
    4 batches on 2 node(s), 8 devices:
      dcp        17.708 MB sent,     3.686 MB of it between nodes; compute imbalance 1.10, tokens ...
      zigzag     56.347 MB sent,     8.264 MB of it between nodes; compute imbalance 1.22, tokens ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import common
from dpo_shared_question import Options, pairs
from transformers import set_seed
from trl import RewardConfig, RewardTrainer

import hf_dcp


def build(argv: Sequence[str]) -> tuple[Callable[[], dict[str, Any]], Options]:
    options, args = common.parse(
        Options,
        RewardConfig,
        argv,
        __doc__ or "",
        output_dir="runs/reward",
        per_device_train_batch_size=24,  # pairs of a step of the whole DCP group: four questions with four answers
        gradient_checkpointing=False,
        max_length=None,
    )
    args.max_length = args.max_length or options.max_tokens
    set_seed(args.seed)
    with args.main_process_first(desc="data"):
        model, tokenizer = common.load_model(options, rewards=True)
        data = pairs(options, tokenizer)
    trainer = RewardTrainer(
        model,
        args,
        train_dataset=data,
        processing_class=tokenizer,
        data_collator=args.parallelism_config.preference_collator(tokenizer),
        callbacks=[hf_dcp.DcpStatsCallback()],
    )
    return lambda: common.train(trainer, options), options


if __name__ == "__main__":
    common.run("reward_shared_question.py", build)
