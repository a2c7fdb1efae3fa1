"""What of TRL, and of pairs of answers, DCP can't do: refused by name when the trainer is made."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from datasets import Dataset, disable_progress_bars
from peft import PromptTuningConfig
from transformers import Trainer, TrainingArguments
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

import hf_dcp
from hf_dcp.integrations.preferences import PreferenceCollator
from hf_dcp.integrations.trl_checks import refuse_trainer
from tests.integrations.small import rows, small_llama
from tests.integrations.test_trainer import fresh
from tests.integrations.trl_small import arguments, dpo, pairs, sft, small_rewards, tokenizer

disable_progress_bars()
REFUSED = {
    "trl": ("GRPOTrainer", "RLOOTrainer", "DistillationTrainer", "KTOTrainer"),
    "trl.experimental.gkd": ("GKDTrainer",),
    "trl.experimental.online_dpo": ("OnlineDPOTrainer",),
    "trl.experimental.orpo": ("ORPOTrainer",),
    "trl.experimental.cpo": ("CPOTrainer",),
    "trl.experimental.bema_for_ref_model": ("DPOTrainer",),
}


@pytest.mark.parametrize(("module", "names"), REFUSED.items())
def test_trainers_are_refused_by_name(module: str, names: tuple[str, ...]) -> None:
    try:
        found = importlib.import_module(module)
    except ImportError as error:  # some need more packages than trl itself
        pytest.skip(str(error))
    for name in names:
        kind = getattr(found, name)
        with pytest.raises(ValueError, match=f"{name} can't run with DCP"):
            refuse_trainer(kind)
        with pytest.raises(ValueError, match=f"{name} can't run with DCP"):
            refuse_trainer(type("Mine", (kind,), {}))


def test_supported_trainers_and_others_are_not_refused() -> None:
    import trl

    for kind in (Trainer, trl.SFTTrainer, trl.DPOTrainer, trl.RewardTrainer, type("Mine", (trl.DPOTrainer,), {})):
        refuse_trainer(kind)


@pytest.mark.parametrize(("trainer", "config"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)])
def test_they_are_refused_without_a_callback(trainer: Any, config: Any) -> None:
    """The plugin alone is enough: nothing else of ours sees such a trainer."""
    fresh()
    args = arguments(
        config, parallelism_config=hf_dcp.DcpParallelismConfig(), num_generations=2, per_device_train_batch_size=2
    )
    data = Dataset.from_list([{"prompt": "w5 w6"}] * 4)
    with pytest.raises(ValueError, match=f"{trainer.__name__} can't run with DCP"):
        trainer(
            model=small_llama("sdpa"),
            reward_funcs=lambda completions, **rest: [0.0] * len(completions),
            args=args,
            train_dataset=data,
            processing_class=tokenizer(),
        )


def test_collators_must_fit_trainers() -> None:
    fresh()
    plugin = hf_dcp.DcpParallelismConfig(dcp_size=1)
    args = arguments(TrainingArguments, parallelism_config=plugin)
    with pytest.raises(ValueError, match=r"data_collator of Trainer must be dcp.collator\("):
        Trainer(
            small_llama(),
            args,
            train_dataset=rows([5, 6]),
            data_collator=plugin.preference_collator(tokenizer()),
            callbacks=[hf_dcp.DcpStatsCallback()],
        )
    fresh()
    from trl import DPOConfig, DPOTrainer

    plugin = hf_dcp.DcpParallelismConfig(dcp_size=1)
    with pytest.raises(ValueError, match=r"data_collator of DPOTrainer must be dcp.preference_collator\("):
        DPOTrainer(
            small_llama(),
            small_llama(seed=1),
            arguments(DPOConfig, parallelism_config=plugin),
            train_dataset=pairs(4),
            processing_class=tokenizer(),
            data_collator=plugin.collator(tokenizer()),
            callbacks=[hf_dcp.DcpStatsCallback()],
        )


def test_prompt_learning_is_refused() -> None:
    fresh()
    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="PROMPT_TUNING of PEFT puts tokens before each sequence"):
        dpo(1, pairs(4), peft_config=prompts)


def test_a_reference_model_without_hooks_is_named() -> None:
    fresh()
    with pytest.raises(ValueError, match=r"dcp.attach\(model\)"):
        dpo(1, pairs(4), reference=small_llama(seed=1), precompute_ref_log_probs=True)


def test_a_reward_model_is_for_its_trainer() -> None:
    fresh()
    plugin = hf_dcp.DcpParallelismConfig(dcp_size=1)
    plugin.setup()
    with pytest.raises(ValueError, match="DCP trains causal language models"):
        plugin.attach(small_rewards())


def test_packing_with_a_collator_is_refused_by_trl() -> None:
    """TRL packs beforehand: `trl.pack_dataset`, and the mask `packed`."""
    fresh()
    with pytest.raises(ValueError, match="custom data collator is not supported when using padding-free"):
        sft(1, Dataset.from_list([{"text": "w4 w5"}] * 4), packing=True, max_length=8)


def stocked(**options: Any) -> PreferenceCollator:
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    session = hf_dcp.DcpParallelismConfig(dcp_size=1).session
    return PreferenceCollator(session, stock=DataCollatorForPreference(pad_token_id=0, **options))


def test_bad_rows_are_named() -> None:
    good = {"prompt_ids": [5, 6, 7], "chosen_ids": [8], "rejected_ids": [9]}
    assert stocked().read([good]).spec.num_tokens == 4
    without = {name: value for name, value in good.items() if name != "rejected_ids"}
    with pytest.raises(ValueError, match="row 1 of the batch has no rejected_ids"):
        stocked().read([good, without])
    with pytest.raises(ValueError, match="row 1 of the batch has no token in chosen_ids"):
        stocked().read([good, good | {"chosen_ids": []}])
    with pytest.raises(ValueError, match="row 1 of the batch has no token of an answer within max_length"):
        stocked(max_length=4).read([good, good | {"prompt_ids": [5, 6, 7, 8]}])
    with pytest.raises(ValueError, match="the collator of preferences doesn't know its trainer"):
        PreferenceCollator(hf_dcp.DcpParallelismConfig(dcp_size=1).session).read([good])


def test_tokenizers_need_a_padding_token() -> None:
    tokens = tokenizer()
    tokens.pad_token = tokens.eos_token = None
    with pytest.raises(ValueError, match="the tokenizer has no pad_token"):
        hf_dcp.DcpParallelismConfig(dcp_size=1).preference_collator(tokens)
