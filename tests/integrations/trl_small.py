"""Small preference data, a tokenizer of words, and stock trainers of TRL with and without DCP."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

import hf_dcp
from tests.integrations.small import BASE, VOCABULARY, _random, small_llama
from tests.integrations.test_trainer import flat, fresh

IGNORED = ("runtime", "samples_per_second", "steps_per_second", "dcp/", "total_flos")


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word w0, w1, ..."""
    words = {"<pad>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}w2 {{ m.content }} {% else %}w3 {% generation %}{{ m.content }} </s>"
        "{% endgeneration %} {% endif %}{% endfor %}{% if add_generation_prompt %}w3 {% endif %}"
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>", chat_template=template)


def words(generator: np.random.Generator, count: int) -> str:
    return " ".join(f"w{i}" for i in generator.integers(4, VOCABULARY, count))


def pairs(count: int = 12, seed: int = 3) -> Dataset:
    """Pairs with unequal answers, some with a common beginning, one with equal answers, two with an empty prompt."""
    generator = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        prompt = words(generator, generator.integers(3, 24)) if i % 6 else ""
        start = words(generator, 3) + " " if i % 4 == 1 else ""
        chosen, rejected = (start + words(generator, generator.integers(1, 12)) for _ in range(2))
        rejected = chosen if i == 2 else rejected
        rows.append({"prompt": prompt and prompt + " ", "chosen": chosen + " ", "rejected": rejected + " "})
    return Dataset.from_list(rows)


def ranked_pairs(questions: int, answers: int, seed: int = 4) -> Dataset:
    """All pairs of ranked answers, those of a question behind each other."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(questions):
        prompt = words(generator, 17) + " "
        ranked = [words(generator, generator.integers(2, 9)) + " " for _ in range(answers)]
        rows += [
            {"prompt": prompt, "chosen": ranked[i], "rejected": ranked[j]}
            for i in range(answers)
            for j in range(i + 1, answers)
        ]
    return Dataset.from_list(rows)


def small_rewards(attention: str = "dcp", seed: int = 0) -> Any:
    """A Llama with a head of scores."""
    config = LlamaConfig(**BASE, num_labels=1, pad_token_id=0)
    return _random(LlamaForSequenceClassification, config, attention, seed)


def arguments(kind: type, **changes: Any) -> Any:
    defaults = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "train_sampling_strategy": "sequential",
        "max_steps": 10,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    return kind(**(defaults | changes))


def dpo(dcp_size: int | None, data: Dataset, model: Any = None, reference: Any = None, **changes: Any) -> DPOTrainer:
    """A DPOTrainer; dcp_size None: stock, with sdpa."""
    evaluation, peft_config = changes.pop("eval_dataset", None), changes.pop("peft_config", None)
    attention = "sdpa" if dcp_size is None else "dcp"
    given = _dcp(dcp_size, tokenizer())
    with_reference = peft_config is None and not changes.get("precompute_ref_log_probs")
    return DPOTrainer(
        model or small_llama(attention),
        reference if reference is not None or not with_reference else small_llama(attention, seed=1),
        arguments(DPOConfig, **(changes | given.pop("args"))),
        train_dataset=data,
        eval_dataset=evaluation,
        processing_class=tokenizer(),
        peft_config=peft_config,
        **given,
    )


def rewards(dcp_size: int | None, data: Dataset, **changes: Any) -> RewardTrainer:
    attention = "sdpa" if dcp_size is None else "dcp"
    evaluation, peft_config = changes.pop("eval_dataset", None), changes.pop("peft_config", None)
    given = _dcp(dcp_size, tokenizer())
    return RewardTrainer(
        small_rewards(attention),
        arguments(RewardConfig, **(changes | given.pop("args"))),
        train_dataset=data,
        eval_dataset=evaluation,
        processing_class=tokenizer(),
        peft_config=peft_config,
        **given,
    )


def sft(dcp_size: int | None, data: Dataset, mask: Any = "causal", **changes: Any) -> SFTTrainer:
    attention = "sdpa" if dcp_size is None else "dcp"
    evaluation = changes.pop("eval_dataset", None)
    given = _dcp(dcp_size, tokenizer())
    if dcp_size is not None:
        given["data_collator"] = given["args"]["parallelism_config"].collator(tokenizer(), mask=mask)
    return SFTTrainer(
        small_llama(attention),
        arguments(SFTConfig, **(changes | given.pop("args"))),
        train_dataset=data,
        eval_dataset=evaluation,
        processing_class=tokenizer(),
        **given,
    )


def _dcp(dcp_size: int | None, tokens: PreTrainedTokenizerFast) -> dict[str, Any]:
    """What a user adds to a stock trainer."""
    if dcp_size is None:
        return {"args": {}}
    plugin = hf_dcp.DcpParallelismConfig(dcp_size=dcp_size, dcp=hf_dcp.DcpConfig(block_size=8))
    return {
        "args": {"parallelism_config": plugin},
        "data_collator": plugin.preference_collator(tokens),
        "callbacks": [hf_dcp.DcpStatsCallback()],
    }


def train(make: Any, dcp_size: int | None, *args: Any, **options: Any) -> dict[str, Any]:
    """Logs of all steps, evaluation where there is a set, parameters."""
    fresh()
    trainer = make(dcp_size, *args, **options)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    if trainer.eval_dataset is not None:
        logs.append(trainer.evaluate())
    kept = [{n: v for n, v in entry.items() if not any(name in n for name in IGNORED)} for entry in logs]
    return {
        "logs": kept,
        "tokens": [entry["dcp/tokens"] for entry in logs if "dcp/tokens" in entry],
        "parameters": flat(trainer.model).tolist(),
    }


def differences(got: dict[str, Any], want: dict[str, Any]) -> dict[str, float]:
    """Largest difference of every logged number over the steps, and of parameters; the same numbers must be logged."""
    found: dict[str, float] = {}
    assert len(got["logs"]) == len(want["logs"])
    for mine, stock in zip(got["logs"], want["logs"], strict=True):
        assert mine.keys() == stock.keys(), mine.keys() ^ stock.keys()
        for name, value in stock.items():
            found[name] = max(found.get(name, 0.0), abs(mine[name] - value))
    delta = torch.tensor(got["parameters"]) - torch.tensor(want["parameters"])
    return found | {"parameters": float(delta.abs().max())}
