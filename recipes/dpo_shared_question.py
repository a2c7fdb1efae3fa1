"""DPO with stock TRL, each question computed once for all of its ranked answers.

With no arguments and no network it trains a small Llama on functions of Python's standard library and four ranked one-line
descriptions of each:

    accelerate launch --config_file recipes/cpu_4.yaml recipes/dpo_shared_question.py

On your own model and data, columns ``question`` and ``answers`` (the best first), or ``prompt``, ``chosen`` and ``rejected``:

    accelerate launch --config_file recipes/gpu_8.yaml recipes/dpo_shared_question.py --model NAME --dataset pairs.jsonl \
        --max_tokens 32768 --learning_rate 5e-7 --max_steps 500

Besides its own options it takes all of TRL's `DPOConfig`. ``--dataset wordnet`` asks what words mean, with WordNet's files
where Debian's package wordnet-base puts them. Expected output of the first command,
shortened (numbers depend on the sources of your Python):

    {'loss': '0.6931', ..., 'rewards/margins': '0', ..., 'dcp/tokens': ...}
    ...
    dpo_shared_question.py: 20 steps, loss 0.6931 -> 0.1524
    ...
    4 batches on 2 node(s), 8 devices:
      dcp        18.321 MB sent,     4.078 MB of it between nodes; compute imbalance 1.10, tokens ...
      zigzag     55.775 MB sent,     8.135 MB of it between nodes; compute imbalance 1.17, tokens ...
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
from data import questions
from datasets import Dataset
from transformers import set_seed
from trl import DPOConfig, DPOTrainer

import hf_dcp
from hf_dcp.data.answers import check_question, ranked_pairs


@dataclass
class Options(common.Options):
    questions: int = field(default=20, metadata={"help": "so many questions of a data set that is made offline"})


def pairs(options: Options, tokenizer: Any) -> Dataset:
    """All pairs of ranked answers, those of a question behind each other; a data set of pairs as it is.

    Raises:
        ValueError: for rows that are neither, or whose question leaves no token for an answer; the text names the row.
    """
    if options.dataset in ("", "wordnet"):
        work_dir = Path(options.work_dir)
        data = questions.wordnet() if options.dataset else questions.functions(work_dir, longest=options.max_tokens)
        return Dataset.from_list(ranked_pairs(data.select(range(min(options.questions, len(data))))))
    data = common.load_rows(options, questions.functions, ())
    given = "chosen" in data.column_names and "rejected" in data.column_names
    column = "prompt" if given else "question"
    made = data if given else Dataset.from_list(ranked_pairs(data))
    for number, question in enumerate(data[column] if column in data.column_names else ()):
        if isinstance(question, str):
            check_question(number, len(tokenizer(question)["input_ids"]), options.max_tokens)
    return made


def build(argv: Sequence[str]) -> tuple[Callable[[], dict[str, Any]], Options]:
    options, args = common.parse(
        Options,
        DPOConfig,
        argv,
        __doc__ or "",
        output_dir="runs/dpo",
        per_device_train_batch_size=24,  # pairs of a step of the whole DCP group: four questions with four answers
        gradient_checkpointing=False,
        max_length=None,
    )
    args.max_length = args.max_length or options.max_tokens
    set_seed(args.seed)
    with args.main_process_first(desc="data"):
        model, tokenizer = common.load_model(options)
        data = pairs(options, tokenizer)
    trainer = DPOTrainer(
        model,
        copy.deepcopy(model),  # the reference; leave it out with PEFT, or if the model has a name
        args,
        train_dataset=data,
        processing_class=tokenizer,
        data_collator=args.parallelism_config.preference_collator(tokenizer),
        callbacks=[hf_dcp.DcpStatsCallback()],
    )
    return lambda: common.train(trainer, options), options


if __name__ == "__main__":
    common.run("dpo_shared_question.py", build)
