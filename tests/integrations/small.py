"""Small models and data for tests, and one process's answer to compare with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 97
IGNORE = -100
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def small_llama(attention: str = "dcp", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A Llama in fp32; equal for equal seeds, whatever the attention."""
    return _random(LlamaForCausalLM, LlamaConfig(**(BASE | changes)), attention, seed)


def small_qwen(attention: str = "dcp", seed: int = 0, window: int = 7) -> PreTrainedModel:
    """A Qwen2 with a full layer and a layer with a sliding window."""
    config = Qwen2Config(**BASE, use_sliding_window=True, sliding_window=window, max_window_layers=1)
    return _random(Qwen2ForCausalLM, config, attention, seed)


def _random(kind: Any, config: Any, attention: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = kind._from_config(config, attn_implementation=attention, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # below 1, where a last bit is 6e-8
            nn.init.uniform_(parameter, 0.5, 0.9)
        else:
            nn.init.normal_(parameter, std=0.08)
    return model


def rows(lengths: list[int], seed: int = 1) -> list[dict[str, Any]]:
    """Rows of random tokens; the first third of every second row is a prompt without labels."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i, length in enumerate(lengths):
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        labels = [IGNORE] * (length // 3) + ids[length // 3 :] if i % 2 else ids
        made.append({"input_ids": ids, "labels": labels, "length": length})
    return made


def random_lengths(count: int, seed: int = 5, least: int = 4, most: int = 60) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(least, most, (count,), generator=generator).tolist()


def reference_loss(model: nn.Module, batch: list[dict[str, Any]]) -> tuple[Tensor, int]:
    """Sum of the losses of all rows, each run alone by the stock model, and the number of labels."""
    total, count = torch.zeros(()), 0
    for row in batch:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        total = total + nn.functional.cross_entropy(logits, labels[1:], ignore_index=IGNORE, reduction="sum")
        count += int((labels[1:] != IGNORE).sum())
    return total, count


def relative_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """max |got - want| over all tensors / max |want|."""
    return max(float((got[n] - want[n]).abs().max()) for n in want) / max(float(w.abs().max()) for w in want.values())


def gradients(model: nn.Module, unused: bool = False) -> dict[str, Tensor]:
    """Copies of all gradients; every parameter must have one, unless some are ``unused``."""
    found = {}
    for name, parameter in model.named_parameters():
        if unused and parameter.grad is None:
            continue
        assert parameter.grad is not None, f"{name} has no gradient"
        found[name] = parameter.grad.detach().clone()
    return found
