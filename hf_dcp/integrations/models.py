"""What a plan must know of a model, read from it; and models that DCP can't run, refused by name and reason."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from hf_dcp.integrations.attention import NAME
from hf_dcp.integrations.probe import Probe, ProbeFailure, model_class, probe
from hf_dcp.planning.batch import ModelShape

DTYPE_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout", "attention_dropout_prob")
LAYER_TYPES = ("full_attention", "sliding_attention", "attention")


@dataclass(frozen=True)
class ModelAttention:
    """The attention of a model.

    Args:
        shape: what a plan must know.
        calls: calls of attention in one forward.
    """

    shape: ModelShape
    calls: int


def check_model(model: nn.Module, dtype: torch.dtype | None = None) -> ModelShape:
    """The attention of a model, or an error that says why DCP can't run it.

    Args:
        model: a causal language model of Transformers, loaded with ``attn_implementation="dcp"``; may be wrapped by
            PEFT.
        dtype: type in which attention runs, where it is not the type of the weights: that of autocast.

    Raises:
        ValueError: for a model that doesn't call the attention function, would call it with something that DCP can't
            honour, or computes something else over the tokens of a sequence.
    """
    return check_attention(model, dtype).shape


def check_attention(model: nn.Module, dtype: torch.dtype | None = None) -> ModelAttention:
    """As `check_model`, with the number of calls of attention in a forward."""
    base = base_model(model)
    _refuse_by_class(base)
    _refuse_by_config(base)
    _refuse_positions(base)
    _refuse_dropout_of_layers(base)
    return _attention_of(base, dtype)


def base_model(model: nn.Module) -> PreTrainedModel:
    """The Transformers model inside wrappers. Raises ValueError if there is none."""
    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        if hasattr(inner, "get_base_model"):  # PEFT
            inner = inner.get_base_model()
        elif hasattr(inner, "module"):  # DDP
            inner = inner.module
        elif hasattr(inner, "_orig_mod"):  # torch.compile
            inner = inner._orig_mod
        else:
            raise ValueError(f"{type(model).__name__} is no model of Transformers: DCP needs a PreTrainedModel")
    return inner


def _refuse_by_class(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if not model._supports_attention_backend or not model._can_set_attn_implementation():
        raise ValueError(
            f"{name} does not take its attention from Transformers' attention interface, so DCP can't run it: use a "
            "model whose class has _supports_attention_backend, such as Llama, Qwen or Mistral"
        )
    if model.config._attn_implementation != NAME:
        raise ValueError(
            f'{name} has attn_implementation="{model.config._attn_implementation}": load it with '
            f'attn_implementation="{NAME}", or call model.set_attn_implementation("{NAME}")'
        )
    if getattr(model, "_is_stateful", False):
        raise ValueError(f"{name} carries a state from token to token, which DCP can't cut: use a model with attention")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder, which DCP can't run: use a decoder-only model")
    if "For" in name and LOSS_MAPPING.get(model.loss_type or "ForCausalLM") is not ForCausalLMLoss:
        raise ValueError(
            f"{name} has the loss {model.loss_type}, and DCP trains causal language models: use ...ForCausalLM"
        )


def _refuse_by_config(model: PreTrainedModel) -> None:
    name, config = type(model).__name__, model.config.get_text_config()
    for field in DROPOUTS:
        value = getattr(config, field, None)
        if isinstance(value, (int, float)) and value > 0:
            raise ValueError(f"{name} has {field}={value}, which DCP can't honour: set {field}=0 in its config")
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in LAYER_TYPES:
            raise ValueError(
                f"{name} has layers of type {kind}, which DCP can't run: use a model with {LAYER_TYPES[:2]}"
            )


def _refuse_positions(model: PreTrainedModel) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and "position" in name and module.padding_idx is not None:
            raise ValueError(
                f"{type(model).__name__} counts positions from its padding token's id ({name}.padding_idx="
                f"{module.padding_idx}), and DCP from 0: use a model with positions from 0"
            )


def _refuse_dropout_of_layers(model: PreTrainedModel) -> None:
    """Dropout that is no field of the configuration."""
    for layer in model.modules():
        if "Attention" not in type(layer).__name__:
            continue
        for field in (*DROPOUTS, "dropout_p"):
            value = getattr(layer, field, None)
            value = value.p if isinstance(value, nn.Dropout) else value
            if isinstance(value, (int, float)) and value > 0:
                raise ValueError(
                    f"{type(layer).__name__} has {field}={value}, which DCP can't honour: set the model's attention "
                    "dropout to 0"
                )


def _attention_of(model: PreTrainedModel, dtype: torch.dtype | None) -> ModelAttention:
    name, dtype = type(model).__name__, dtype or model.dtype
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"{name} runs in {dtype}: use one of {', '.join(DTYPE_NAMES.values())}")
    seen = _probe(model)
    if seen.convolutions:
        raise ValueError(f"{name} convolves over tokens, which DCP can't run: it exchanges rows in attention alone")
    if not seen.calls:
        raise ValueError(f"no call of attention was found in {name}, so DCP can't run it")
    sizes = {(call.heads, call.kv_heads, call.head_dim) for call in seen.calls}
    if len(sizes) > 1:
        text = "; ".join(f"{heads} and {kv_heads} of {dim} numbers" for heads, kv_heads, dim in sorted(sizes))
        raise ValueError(f"{name} has layers with different heads and KV heads ({text}): DCP needs the same in all")
    heads, kv_heads, head_dim = sizes.pop()
    parts = getattr(model, "_tp_size", None) or 1
    if kv_heads % parts or heads % parts:
        raise ValueError(
            f"{name} has {heads} heads and {kv_heads} KV heads, which {parts} tensor parallel ranks can't divide: set "
            "a tp_size that divides both"
        )
    windows: Counter[int | None] = Counter(call.window for call in seen.calls)
    # None first, then ascending: the same order on every rank and for every Python.
    ordered = sorted(windows.items(), key=lambda item: (item[0] is not None, item[0] or 0))
    shape = ModelShape(heads // parts, kv_heads // parts, head_dim, DTYPE_NAMES[dtype], tuple(ordered))
    return ModelAttention(shape, len(seen.calls))


def _probe(model: PreTrainedModel) -> Probe:
    key = (model_class(model), model.config.to_json_string(use_diff=False))
    if key not in _SEEN:
        try:
            _SEEN[key] = probe(model)
        except ProbeFailure as error:
            raise ValueError(f"{error}, so DCP can't tell how it attends: use sdpa") from error
    return _SEEN[key]


_SEEN: dict[tuple[type, str], Probe] = {}
"""Probes by class and configuration: they depend on nothing else."""


def find_models() -> list[PreTrainedModel]:
    """One model of this process for each kind of attention among those with ``attn_implementation="dcp"``."""
    everything = [thing for thing in gc.get_objects() if issubclass(type(thing), PreTrainedModel)]
    models = [model for model in everything if model.config._attn_implementation == NAME]
    inner = {id(child) for model in models for child in model.modules() if child is not model}
    found: dict[ModelShape, PreTrainedModel] = {}
    for model in models:
        if id(model) not in inner:
            found.setdefault(check_model(model), model)
    return list(found.values())
