"""Stock trainers of TRL with DCP on several ranks against the same trainers in one process without it."""

from __future__ import annotations

import json
import multiprocessing
import os
from typing import Any

import pytest
import torch.distributed as dist
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig

import hf_dcp
from hf_dcp.data import sharing
from hf_dcp.integrations import preferences
from hf_dcp.integrations.trl import packed
from tests.integrations.small import rows
from tests.integrations.trl_small import differences, dpo, pairs, ranked_pairs, rewards, sft, train, words
from tests.multiprocess import run_ranks

os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
pytestmark = pytest.mark.timeout(900)  # the first test runs all cases
disable_progress_bars()
CLOSE = 1e-5
SUMS = 1e-6  # of numbers that are sums over tokens: relative to their size, which is below 100
RANKED = 4


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)


def lora_of_rewards() -> LoraConfig:
    return LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["score"])


SHORT = {"max_steps": 2}
DPO: dict[str, dict[str, Any]] = {
    "plain": {"eval_dataset": pairs(5, seed=9)},
    "mixture": SHORT | {"loss_type": ["sigmoid", "sft", "ipo"], "loss_weights": [0.5, 1.0, 0.1]},
    "weighting": SHORT | {"use_weighting": True, "ld_alpha": 0.5, "gradient_accumulation_steps": 2},
    "keep_start": SHORT | {"max_length": 17},
    "keep_end": SHORT | {"max_length": 12, "truncation_mode": "keep_end"},
    "workers": SHORT | {"dataloader_num_workers": 1},
    "lora": SHORT | {"peft_config": lora(), "gradient_checkpointing": True},
}
SFT: dict[str, tuple[Any, dict[str, Any]]] = {}


def text_rows(kind: str, count: int = 6) -> Dataset:
    """A data set of one of the formats that SFTTrainer takes."""
    import numpy as np

    generator = np.random.default_rng(5)
    made: list[dict[str, Any]] = []
    for _ in range(count):
        first, second = words(generator, generator.integers(3, 20)), words(generator, generator.integers(2, 12))
        if kind == "completion":
            made.append({"prompt": first + " ", "completion": second})
        else:
            turns = [("user", first), ("assistant", second), ("user", second), ("assistant", first)]
            made.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    return Dataset.from_list(made)


def documents(packing: bool) -> Dataset:
    """The same documents, two in a row or each in its own."""
    made = rows([9, 14, 5, 21, 16, 3, 8, 11])
    single = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in made]
    if not packing:
        return Dataset.from_list(single)
    both = [
        {
            "input_ids": a["input_ids"] + b["input_ids"],
            "labels": a["labels"] + [-100] + b["labels"][1:],
            "seq_lengths": [len(a["input_ids"]), len(b["input_ids"])],
        }
        for a, b in zip(single[::2], single[1::2])
    ]
    return Dataset.from_list(both)


def sft_case(name: str, dcp_size: int | None) -> dict[str, Any]:
    if name == "packed":
        batch = 4 if dcp_size is None else 2
        options = {"max_length": None, "per_device_train_batch_size": batch, "mask": packed}
        if dcp_size is None:
            options.pop("mask")
        return train(sft, dcp_size, documents(dcp_size is not None), **SHORT, **options)
    data = text_rows("completion" if name == "completion" else "chat")
    options = SHORT | {"eval_dataset": data, "assistant_only_loss": name == "assistant"}
    return train(sft, dcp_size, data, **options)


def all_cases(dcp_size: int | None) -> dict[str, Any]:
    answers = {f"dpo {name}": train(dpo, dcp_size, pairs(), **options) for name, options in DPO.items()}
    ranked = {"per_device_train_batch_size": RANKED * (RANKED - 1) // 2, "max_steps": 3}
    answers["dpo ranked"] = train(dpo, dcp_size, ranked_pairs(3, RANKED), **ranked)
    few = {"max_steps": 3, "eval_dataset": pairs(5, seed=9), "center_rewards_coefficient": 0.1}
    answers["rewards"] = train(rewards, dcp_size, pairs(), **few)
    answers["rewards lora"] = train(rewards, dcp_size, pairs(), **SHORT, peft_config=lora_of_rewards())
    answers |= {f"sft {name}": sft_case(name, dcp_size) for name in ("completion", "assistant", "packed")}
    return answers


def controls(dcp_size: int) -> dict[str, Any]:
    """Two ways to get it wrong."""
    answers = {}
    stock = sharing.shared_question
    sharing.shared_question = lambda question, answers: hf_dcp.causal()  # type: ignore[assignment]
    answers["answers see each other"] = train(dpo, dcp_size, pairs(), **SHORT)
    sharing.shared_question = stock
    backward = preferences._Gather.backward

    def unscaled(ctx: Any, gradient: Any) -> Any:
        return gradient[ctx.saved_tensors[0]], None, None, None

    preferences._Gather.backward = staticmethod(unscaled)
    answers["gradients averaged"] = train(dpo, dcp_size, pairs(), **SHORT)
    preferences._Gather.backward = staticmethod(backward)
    return answers


def refusal(dcp_size: int) -> str:
    """What a trainer says that is to compute the reference's log-probabilities beforehand."""
    with pytest.raises(ValueError) as refused:
        dpo(dcp_size, pairs(4), precompute_ref_log_probs=True)
    return str(refused.value)


def on_ranks() -> str:
    disable_progress_bars()
    multiprocessing.current_process()._config["daemon"] = False  # it is to have data loader workers
    world = dist.get_world_size()
    return json.dumps(all_cases(world) | controls(world) | {"refusal": refusal(world)})


@pytest.fixture(scope="module")
def stock() -> dict[str, Any]:
    return all_cases(None)


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, Any]]:
    return [json.loads(text) for text in run_ranks(on_ranks, 2, timeout=500)]


def check(found: dict[str, float]) -> None:
    for name, difference in found.items():
        limit = 100 * SUMS if "logps" in name or "num_tokens" in name else CLOSE
        assert difference <= limit, (name, difference)


CASES = [f"dpo {name}" for name in DPO] + ["dpo ranked", "rewards", "rewards lora"]


@pytest.mark.parametrize("name", CASES)
def test_pairs_on_two_ranks_are_those_of_one_process(
    name: str, stock: dict[str, Any], on_two: list[dict[str, Any]]
) -> None:
    for result in on_two:
        check(differences(result[name], stock[name]))
    for log in on_two[0][name]["logs"]:
        assert "rewards/margins" in log or "margin" in log or any(key.startswith("eval_") for key in log)


@pytest.mark.parametrize("name", ["completion", "assistant", "packed"])
def test_sft_on_two_ranks_is_that_of_one_process(
    name: str, stock: dict[str, Any], on_two: list[dict[str, Any]]
) -> None:
    for result in on_two:
        check(differences(result[f"sft {name}"], stock[f"sft {name}"]))


def test_wrong_variants_are_found(stock: dict[str, Any], on_two: list[dict[str, Any]]) -> None:
    right = stock["dpo plain"]
    short = {"logs": right["logs"][:2], "parameters": right["parameters"]}
    seen = differences(on_two[0]["answers see each other"], short)
    assert seen["logps/chosen"] > 1e-3  # two hundred times what rounding makes
    norm = differences(on_two[0]["gradients averaged"], short)["grad_norm"]
    assert norm > 0.1 * right["logs"][0]["grad_norm"]


def test_what_trl_joins_over_ranks_is_refused_on_all_of_them(on_two: list[dict[str, Any]]) -> None:
    for result in on_two:
        assert result["refusal"].startswith("precompute_ref_log_probs=True can't be honoured by DCP")


def test_ranked_answers_are_there_once(on_two: list[dict[str, Any]]) -> None:
    data = ranked_pairs(3, RANKED)
    words_of = [
        {row[c] for row in data.select(range(6 * q, 6 * q + 6)) for c in ("chosen", "rejected")} for q in range(3)
    ]
    # question without its last word; of each answer that word, its own, and not the end of text that nothing follows
    want = [16 + sum(1 + len(answer.split()) for answer in answers) for answers in words_of]
    assert on_two[0]["dpo ranked"]["tokens"] == want


def test_ranked_answers_are_the_sum_of_their_pairs(stock: dict[str, Any]) -> None:
    """One batch of all pairs of a question, against each pair in a batch of its own, without DCP: mean of losses."""
    data = ranked_pairs(1, RANKED)
    each = train(dpo, None, data, per_device_train_batch_size=1, max_steps=6, learning_rate=0.0)
    together = train(dpo, 1, data, per_device_train_batch_size=6, max_steps=1, learning_rate=0.0)
    for name in ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins"):
        want = sum(log[name] for log in each["logs"]) / 6
        assert together["logs"][0][name] == pytest.approx(want, abs=CLOSE), name


def on_four() -> str:
    disable_progress_bars()
    return json.dumps(
        {
            "dcp 4": train(dpo, 4, pairs(), eval_dataset=pairs(5, seed=9)),
            "dp 2": train(dpo, 2, pairs(), max_steps=3),
            "rewards": train(rewards, 4, pairs()),
        }
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_ranks_are_one_process() -> None:
    results = [json.loads(text) for text in run_ranks(on_four, 4, timeout=500)]
    plain = train(dpo, None, pairs(), eval_dataset=pairs(5, seed=9))
    both = train(dpo, None, pairs(), per_device_train_batch_size=4, max_steps=3)
    alone = train(rewards, None, pairs())
    for result in results:
        check(differences(result["dcp 4"], plain))
        check(differences(result["rewards"], alone))
        check(differences(result["dp 2"], both))
