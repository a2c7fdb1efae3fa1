"""Bad settings end every rank with one sentence, before the first step, and nobody hangs."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_dcp
from hf_dcp.data.collator import DcpCollator
from hf_dcp.integrations.process_groups import gather_texts
from hf_dcp.integrations.trainer_checks import check_arguments
from hf_dcp.rates import Rates
from tests.integrations.small import VOCABULARY, rows, small_llama
from tests.integrations.test_trainer import build, fresh
from tests.multiprocess import run_ranks

DATA = rows([10, 12])
BATCHED = hf_dcp.DcpParallelismConfig().batched(DATA, tokens_per_batch=40)


def _message(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


TRAINER = {
    "train_sampling_strategy": ({"train_sampling_strategy": "random"}, "train_sampling_strategy='random' can't be"),
    "group_by_length": ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy='group_by_length'"),
    "average_tokens": ({"average_tokens_across_devices": False}, "average_tokens_across_devices=False"),
    "neftune": ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
    "torch_compile": ({"torch_compile": True}, "torch_compile=True"),
    "train batch": ({"per_device_train_batch_size": 2}, "per_device_train_batch_size=2 with dcp.batched"),
    "eval batch": (
        {"per_device_eval_batch_size": 4, "evaluation": BATCHED},
        "per_device_eval_batch_size=4 with dcp.batched",
    ),
    "split_batches": ({"accelerator_config": {"split_batches": True}}, "leave split_batches and dispatch_batches out"),
    "dispatch_batches": (
        {"accelerator_config": {"dispatch_batches": True}},
        "leave split_batches and dispatch_batches",
    ),
    "compute_metrics": (
        {"evaluation": BATCHED, "trainer_arguments": {"compute_metrics": len}},
        "compute_metrics would get the predictions of whole batches",
    ),
    "inputs of batches for metrics": (
        {
            "batch_eval_metrics": True,
            "include_for_metrics": ["inputs"],
            "trainer_arguments": {"compute_metrics": lambda prediction, compute_result: {}},
        },
        "batch_eval_metrics would get the inputs of a rank's part",
    ),
    "loss": ({"trainer_arguments": {"compute_loss_func": len}}, "compute_loss_func would get"),
}


@pytest.mark.parametrize("name", TRAINER)
def test_trainer_settings_are_refused_when_it_is_built(name: str) -> None:
    arguments, text = TRAINER[name]
    fresh()
    with pytest.raises(ValueError, match=text):
        build(1, **arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [("deepspeed", "zero.json"), ("use_liger_kernel", True), ("auto_find_batch_size", True), ("_n_gpu", 2)],
)
def test_arguments_for_which_a_library_or_a_device_is_missing_here_are_refused_too(name: str, value: Any) -> None:
    fresh()
    args = build(1).args
    setattr(args, name, value)
    with pytest.raises(ValueError, match=f"{name.strip('_')}=.* can't be honoured by DCP"):
        check_arguments(args)


def test_models_are_refused_when_the_trainer_is_built() -> None:
    for model, text in (
        (small_llama(attention_dropout=0.1), "attention_dropout=0.1"),
        (small_llama("sdpa"), 'attn_implementation="sdpa"'),
    ):
        fresh()
        with pytest.raises(ValueError, match=text):
            build(1, model=model)


def test_a_trainer_without_the_callback_or_the_collator_is_refused() -> None:
    fresh()
    trainer = build(1, callbacks=[], max_steps=1)
    with pytest.raises(ValueError, match="the model is not known to DCP: add hf_dcp.DcpStatsCallback"):
        trainer.train()
    fresh()
    with pytest.raises(ValueError, match=r"data_collator is .*, which doesn't plan"):
        build(1, trainer_arguments={"data_collator": None})


def test_predictions_of_whole_batches_are_refused() -> None:
    fresh()
    trainer = build(1, data=DATA, max_steps=1)
    with pytest.raises(ValueError, match="predictions of whole batches have no order of the data set"):
        trainer.predict(BATCHED)


def test_predictions_that_are_not_per_token_are_refused() -> None:
    fresh()
    arguments = {"preprocess_logits_for_metrics": lambda logits, labels: logits[:, 1:]}
    trainer = build(1, data=DATA, max_steps=1, trainer_arguments=arguments)
    with pytest.raises(ValueError, match="predictions must have one value, or one vector, for each token"):
        trainer.predict(DATA)


def bad_input_on_ranks() -> dict[str, str]:
    """Messages of this rank, each of something that must fail on every rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    answers = {}
    answers["texts"] = "|".join(gather_texts("é" * rank))
    answers["long texts"] = ",".join(str(len(text)) for text in gather_texts("é" * (3000 * rank + 1)))
    measured = Rates(*(number / 3 for number in range(1, 9)))  # with all their digits
    answers["measured rates"] = _message(_plugin(world, hardware=measured).setup)
    fresh()
    answers["world"] = _message(build, 3)
    fresh()
    answers["dropout"] = _message(build, world, model=small_llama(attention_dropout=0.1))
    fresh()
    answers["bloom"] = _message(build, world, model=_bloom())
    answers["settings"] = _message(_plugin(world, seed=rank).setup)
    plugin = hf_dcp.DcpParallelismConfig(dcp_size=world, dcp=hf_dcp.DcpConfig(block_size=8), plan_timeout=20.0)
    model = small_llama()
    plugin.setup()
    plugin.attach(model)
    answers["no plan"] = _message(model, input_ids=torch.zeros(1, 4, dtype=torch.long))
    answers["other batch"] = _message(_other_batch, plugin, model)
    answers["digest"] = _message(_other_digest, plugin, model)
    return answers


def _plugin(world: int, **settings: Any) -> Any:
    return hf_dcp.DcpParallelismConfig(dcp_size=world, dcp=hf_dcp.DcpConfig(**settings))


def _bloom() -> Any:
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4)
    return BloomForCausalLM._from_config(config, attn_implementation="dcp")


def _other_digest(plugin: Any, model: Any) -> None:
    """The last rank has another plan for the batch of all."""
    batch = DcpCollator(plugin.session)(DATA)
    plan = batch["dcp_plan"]
    if dist.get_rank() == dist.get_world_size() - 1:
        plan.rank_plan = replace(plan.rank_plan, digest=plan.rank_plan.digest ^ 1)
    model(**batch)


def _other_batch(plugin: Any, model: Any) -> None:
    """The last rank reads another batch: its plan comes from nobody, and is not that of the others."""
    plugin.session.source().settings.__dict__["timeout"] = 1.0
    last = dist.get_rank() == dist.get_world_size() - 1
    model(**DcpCollator(plugin.session)(rows([9, 13]) if last else DATA))


def test_bad_input_is_an_error_on_every_rank() -> None:
    results = run_ranks(bad_input_on_ranks, 2, timeout=150)
    for answers in results:
        assert answers.pop("texts") == "|é"
        assert answers.pop("long texts") == "1,3001"
        assert answers.pop("measured rates") == "no error"
        for name, text in {
            "world": "ValueError: dcp_size=3 does not divide the number of processes, 2",
            "dropout": "ValueError: LlamaForCausalLM has attention_dropout=0.1",
            "bloom": "ValueError: BloomForCausalLM does not take its attention",
            "settings": "ValueError: the processes have different DCP settings",
            "no plan": "ValueError: the batch has no dcp_plan, but dcp_size is 2",
            "other batch": "RuntimeError: the ranks of the group have different plans",
            "digest": "RuntimeError: the ranks of the group have different plans",
        }.items():
            assert answers[name].startswith(text), (name, answers[name])
    assert results[0] == results[1]


os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
