"""What a plan must know of a model, read from it; and models that DCP can't run, refused by name and reason."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from hf_dcp.integrations.attention import NAME
from hf_dcp.planning.batch import ModelShape

DTYPE_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout", "attention_dropout_prob")
LAYER_TYPES = ("full_attention", "sliding_attention", "attention")
ROPE_OF_LENGTH = ("dynamic", "longrope")


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
    base = base_model(model)
    _refuse_by_class(base)
    _refuse_by_config(base)
    layers = attention_layers(base)
    return _shape(base, layers, dtype)


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
    for kind in _rope_types(getattr(config, "rope_parameters", None)):
        if kind in ROPE_OF_LENGTH:
            raise ValueError(
                f"{name} has rope_type={kind!r}, which depends on the longest position that a rank sees, and a rank "
                f"sees "
                "a part: use a model with another rope_type, such as default, linear, llama3 or yarn"
            )
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in LAYER_TYPES:
            raise ValueError(
                f"{name} has layers of type {kind}, which DCP can't run: use a model with {LAYER_TYPES[:2]}"
            )
    if getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0):
        raise ValueError(
            f"{name} adds a router loss, which is not linear in the tokens of a rank: set output_router_logits=False"
        )


def _rope_types(parameters: Any) -> list[str]:
    """The RoPE types of a config, which has parameters for all layers or for each layer type."""
    if not isinstance(parameters, dict):
        return []
    if "rope_type" in parameters:
        return [parameters["rope_type"]]
    return [kind for value in parameters.values() for kind in _rope_types(value)]


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """The attention modules of a model, in order. Raises ValueError if there is none."""
    layers = [m for m in model.modules() if "Attention" in type(m).__name__ and hasattr(m, "layer_idx")]
    inner = {id(child) for m in layers for child in m.modules() if child is not m}
    layers = [m for m in layers if id(m) not in inner]
    if not layers:
        raise ValueError(f"no attention layers were found in {type(model).__name__}, so DCP can't run it")
    for layer in layers:
        for field in (*DROPOUTS, "dropout_p"):
            value = getattr(layer, field, None)
            value = value.p if isinstance(value, nn.Dropout) else value
            if isinstance(value, (int, float)) and value > 0:
                raise ValueError(
                    f"{type(layer).__name__} has {field}={value}, which DCP can't honour: set the model's attention "
                    "dropout to 0"
                )
    return layers


def _shape(model: PreTrainedModel, layers: list[nn.Module], dtype: torch.dtype | None) -> ModelShape:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dims: set[Any] = {getattr(layer, "head_dim", None) or getattr(config, "head_dim", None) for layer in layers}
    if len(head_dims) > 1:
        raise ValueError(f"{type(model).__name__} has layers with head dims {sorted(head_dims)}: DCP needs one for all")
    head_dim = head_dims.pop() or config.hidden_size // heads
    dtype = dtype or model.dtype
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"{type(model).__name__} runs in {dtype}: use one of {', '.join(DTYPE_NAMES.values())}")
    windows: Counter[int | None] = Counter(layer_window(layer, config) for layer in layers)
    # None first, then ascending: the same order on every rank and for every Python.
    ordered = sorted(windows.items(), key=lambda item: (item[0] is not None, item[0] or 0))
    return ModelShape(heads, kv_heads, head_dim, DTYPE_NAMES[dtype], tuple(ordered))


def layer_window(layer: Any, config: Any) -> int | None:
    """The sliding window of one attention layer, or None."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return config.sliding_window if kinds[layer.layer_idx] == "sliding_attention" else None
    if getattr(layer, "is_sliding", True) is False:
        return None
    if hasattr(layer, "sliding_window"):
        return layer.sliding_window
    return getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None


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
