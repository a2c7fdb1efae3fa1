"""``attn_implementation="dcp"``: what Transformers calls for attention and for masks.

With a plan (the forward argument ``dcp_plan``) attention runs on the whole DCP group, and no mask is ever built.
Without one (generation, a stock batch) it is `sdpa`, on a mask that is built at that moment.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from hf_dcp.integrations.recorder import Recorder, layer_name
from hf_dcp.runtime import DcpPlan, attention

NAME = "dcp"
HARMLESS = ("position_ids", "cache_position")
"""Tensors that attention may be given and needs not look at."""

calls: Counter[str] = Counter()
"""Calls of this process so far: "plan" for calls with a plan, "dense" for calls without one."""


def _group_size_of_environment() -> int:
    text = os.environ.get("HF_DCP_SIZE", "1")
    return int(text) if text.isdecimal() else 1


group_size = _group_size_of_environment()
"""Ranks of this process's DCP group, as far as it is known. Above 1, training without a plan is a mistake."""


class LazyMask:
    """The arguments of a mask, which is built when a call has no plan.

    Args:
        arguments: what Transformers hands to a mask function.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self._built: tuple[Tensor | None] | None = None

    @property
    def window(self) -> int | None:
        """The sliding window that the mask stands for."""
        return self.arguments.get("local_size")

    def is_causal_window(self) -> bool:
        """Whether the mask is causal, or causal within `window`, judged by some rows."""
        function = self.arguments.get("mask_function", causal_mask_function)
        width = self.window
        rows = [0, 1, 5] if width is None else sorted({0, 1, width - 1, width, width + 1, 2 * width + 1})
        query, key = torch.tensor(rows)[:, None], torch.arange(rows[-1] + 2)[None]
        want = (key <= query) & (key > query - (width or rows[-1] + 2))
        zero = torch.zeros((), dtype=torch.long)
        got = torch.as_tensor(function(zero, zero, query, key))
        return bool((got.broadcast_to(want.shape) == want).all())

    def build(self) -> Tensor | None:
        """The mask as sdpa wants it: bool[batch, 1, queries, keys], or None where a flag of the kernel says the same."""
        if self._built is None:
            self._built = (sdpa_mask(**self.arguments),)
        return self._built[0]


def dcp_mask(**arguments: Any) -> LazyMask | Tensor | None:
    """The mask function of ``attn_implementation="dcp"``; see `transformers.masking_utils.sdpa_mask`.

    A batch with padding, or with cached keys, has no plan: its mask is built at once, since generation hands it through
    the model's own checks.
    """
    offset = arguments.get("q_offset", 0)
    cached = isinstance(offset, Tensor) or offset != 0 or arguments.get("q_length") != arguments.get("kv_length")
    mask = LazyMask(arguments)
    return mask.build() if cached or arguments.get("attention_mask") is not None else mask


def dcp_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | LazyMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    dcp_plan: DcpPlan | int | Recorder | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of ``attn_implementation="dcp"``.

    Args:
        query: [batch, heads, tokens, D]; batch is 1 with a plan.
        key, value: [batch, KV heads, tokens, D].
        dcp_plan: the plan of this rank for this batch, or its handle.
        s_aux: sinks, [heads].

    Returns:
        Output [batch, tokens, heads, D], and None in place of weights.

    Raises:
        ValueError: with a plan, for what can't be honoured: dropout, position_bias, a further mask.
    """
    if dcp_plan is None:
        calls["dense"] += 1
        _refuse_training_without_plan(module)
        plain = {"dropout": dropout, "scaling": scaling, "position_bias": position_bias, **kwargs}
        return _without_plan(module, query, key, value, attention_mask, softcap, s_aux, plain), None
    if isinstance(dcp_plan, DcpPlan) and query.shape[0] != 1:
        raise ValueError(
            f"the model got {query.shape[0]} sequences with a plan for one packed one, so it is not known to DCP: call "
            "dcp.attach(model) before its first batch (of a reference model: before the trainer is made)"
        )
    if dropout:
        raise _refusal(dcp_plan, module, f"can't run with DCP, as its attention dropout is {dropout}: set it to 0")
    if position_bias is not None:
        raise _refusal(dcp_plan, module, "has a position_bias, which a dcp_plan can't honour: use a model without one")
    if kwargs.get("output_attentions"):
        raise _refusal(dcp_plan, module, "is asked for output_attentions=True, which DCP can't honour: leave it out")
    window = _window(dcp_plan, module, attention_mask, sliding_window)
    if isinstance(dcp_plan, Recorder):
        _refuse_unknown(dcp_plan, module, kwargs)
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        return dcp_plan.record(module, query, key, value, window, bool(causal)), None
    if not torch.compiler.is_compiling():
        calls["plan"] += 1
    query, key, value = (_autocast(x) for x in (query, key, value))
    out = attention(query, key, value, dcp_plan, window=window, scale=scaling, softcap=softcap, sinks=s_aux)
    return out, None


def _refusal(plan: Any, module: nn.Module, reason: str) -> ValueError:
    return plan.refuse(module, reason) if isinstance(plan, Recorder) else ValueError(f"{layer_name(module)} {reason}")


def _refuse_unknown(recorder: Recorder, module: nn.Module, arguments: dict[str, Any]) -> None:
    """Tensors that a model itself gives to attention mean something; those of a batch come at training alone."""
    unknown = sorted(name for name, value in arguments.items() if isinstance(value, Tensor) and name not in HARMLESS)
    if unknown:
        raise recorder.refuse(module, f"gives {', '.join(unknown)} to attention, which DCP does not know: use sdpa")


def _refuse_training_without_plan(module: nn.Module) -> None:
    """It would be a silent run without DCP: every rank of a group would train on the same batch."""
    if group_size > 1 and module.training and torch.is_grad_enabled():
        raise ValueError(
            f"the batch has no dcp_plan, but dcp_size is {group_size}: use the collator of the DcpParallelismConfig, "
            "dcp.collator(...), as data_collator, or DcpDataLoader"
        )


def _window(plan: Any, module: nn.Module, mask: Tensor | LazyMask | None, argument: int | None) -> int | None:
    """The sliding window of the layer, which models say in the mask, and most of them as an argument too."""
    if mask is None:
        return argument
    if not isinstance(mask, LazyMask):
        reason = (
            "gets an attention_mask beside dcp_plan, which can't be honoured: leave it out, the collator takes masks"
        )
        raise _refusal(plan, module, reason)
    if mask.arguments.get("use_vmap"):
        raise _refusal(plan, module, "has a mask by a function of its own, which a plan can't honour: use sdpa")
    if argument is not None and mask.window != argument:
        reason = f"has sliding_window {argument}, but its mask {mask.window}: the model is not supported"
        raise _refusal(plan, module, reason)
    if isinstance(plan, Recorder) and not mask.is_causal_window():
        kind = "neither causal nor a causal window" if getattr(module, "is_causal", True) else "bidirectional"
        raise _refusal(plan, module, f"has a mask that is {kind}: DCP trains causal models, use sdpa")
    return mask.window


def _autocast(x: Tensor) -> Tensor:
    """What autocast does for the stock kernels, which it knows by name."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.is_floating_point():
        return x.to(torch.get_autocast_dtype(device))
    return x


def _without_plan(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | LazyMask | None,
    softcap: float | None,
    sinks: Tensor | None,
    arguments: dict[str, Any],
) -> Tensor:
    built = mask.build() if isinstance(mask, LazyMask) else mask
    if softcap is None and sinks is None:
        return sdpa_attention_forward(module, query, key, value, built, **arguments)[0]
    if arguments["dropout"] or arguments["position_bias"] is not None:
        raise ValueError("softcap and sinks beside dropout or position_bias can't be honoured: set dropout to 0")
    causal = arguments.get("is_causal")
    if built is None and query.shape[2] > 1 and (getattr(module, "is_causal", True) if causal is None else causal):
        built = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    return _dense(query, key, value, built, arguments["scaling"], softcap, sinks)


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with what sdpa lacks, softcap and sinks: [batch, tokens, heads, D]; softmax in fp32."""
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = torch.where(mask, scores, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)
        scores = torch.cat([scores, column], -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return (weights[..., : key.shape[2]] @ value).transpose(1, 2).contiguous()


AttentionInterface.register(NAME, dcp_attention)
AttentionMaskInterface.register(NAME, dcp_mask)
