"""One tiny random model of every family that DCP is tested with, and what each of them is there for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from tests.integrations.small import BASE, VOCABULARY

WINDOW = 9
OLD: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_inner": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LOCAL_AND_GLOBAL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


@dataclass(frozen=True)
class Family:
    """A model class with a configuration.

    Args:
        model: name of the class in Transformers; its configuration class is found from it.
        changes: of the small configuration.
        stock: the attention of the reference: eager where sdpa lacks a feature.
        base: the small configuration to change.
        position_rows: rows of position ids that the data bring along; 0: none.
        unused: whether some parameters take no part.
    """

    model: str
    changes: dict[str, Any] = field(default_factory=dict)
    stock: str = "sdpa"
    base: dict[str, Any] = field(default_factory=lambda: BASE)
    position_rows: int = 0
    unused: bool = False

    def make(self, attention: str = "dcp", seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """The model with random weights, equal for equal seeds, whatever the attention."""
        kind = getattr(transformers, self.model)
        config = kind.config_class(**(self.base | self.changes))
        torch.manual_seed(seed)
        model = kind._from_config(config, attn_implementation=attention, dtype=dtype)
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:  # below 1, where a last bit is 6e-8
                nn.init.uniform_(parameter, 0.5, 0.9)
            else:
                nn.init.normal_(parameter, std=0.08)
        return model


HEAD_DIM = {"head_dim": 16}
EXACT: dict[str, Family] = {
    "Llama": Family("LlamaForCausalLM"),
    "SmolLM3 (a layer without RoPE)": Family("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0], "pad_token_id": 0}),
    "Qwen2 (a full and a windowed layer)": Family(
        "Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    ),
    "Qwen3": Family("Qwen3ForCausalLM", HEAD_DIM),
    "Mistral (window)": Family("MistralForCausalLM", {"sliding_window": WINDOW}),
    "Mixtral (experts)": Family("MixtralForCausalLM", EXPERTS),
    "Gemma": Family("GemmaForCausalLM", HEAD_DIM),
    "Gemma2 (softcap, window)": Family(
        "Gemma2ForCausalLM",
        HEAD_DIM | {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 7},
        "eager",
    ),
    "Gemma3 (local and global layers)": Family("Gemma3ForCausalLM", HEAD_DIM | LOCAL_AND_GLOBAL),
    "GPT-OSS (sinks, window)": Family(
        "GptOssForCausalLM",
        HEAD_DIM | EXPERTS | LOCAL_AND_GLOBAL | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "eager",
    ),
    "Phi": Family("PhiForCausalLM", {"partial_rotary_factor": 0.5}),
    "Phi3 (window)": Family("Phi3ForCausalLM", {"sliding_window": WINDOW, "pad_token_id": 0}),
    "GPT-NeoX": Family("GPTNeoXForCausalLM", {"rotary_pct": 0.5}),
    "GPT-2": Family("GPT2LMHeadModel", NO_DROPOUT, base=OLD),
    "OPT": Family("OPTForCausalLM", {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "OLMo2": Family("Olmo2ForCausalLM"),
    "Granite (scaling)": Family(
        "GraniteForCausalLM", {"attention_multiplier": 0.4, "embedding_multiplier": 3.0, "logits_scaling": 2.0}
    ),
    "StarCoder2 (window)": Family(
        "Starcoder2ForCausalLM", {"sliding_window": WINDOW, "residual_dropout": 0.0, "embedding_dropout": 0.0}
    ),
    "Cohere2 (local and global layers)": Family("Cohere2ForCausalLM", LOCAL_AND_GLOBAL),
}
"""Families whose logits, loss and gradients must be those of one process."""

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 48,  # one rank alone has longer positions
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
VISION = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "patch_size": 2}
TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
M_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
POSITIONS: dict[str, Family] = {
    # Longer than max_position_embeddings: one rank alone may see only short positions.
    "dynamic RoPE": Family("LlamaForCausalLM", {"rope_parameters": DYNAMIC, "max_position_embeddings": 16}),
    "longrope": Family(
        "Phi3ForCausalLM", {"rope_parameters": LONG, "original_max_position_embeddings": 48, "pad_token_id": 0}
    ),
    "yarn": Family("LlamaForCausalLM", {"rope_parameters": YARN}),
    "2-D position ids of the rows": Family("LlamaForCausalLM", position_rows=1),
    "M-RoPE, 3-D position ids": Family(
        "Qwen2VLForConditionalGeneration",
        {"text_config": BASE | {"rope_parameters": M_ROPE}, "vision_config": VISION},
        base=TOKENS,
        position_rows=3,
        unused=True,
    ),
    "router loss": Family("MixtralForCausalLM", EXPERTS | {"output_router_logits": True, "router_aux_loss_coef": 0.5}),
}
"""What must be right about positions, and the loss of routers, which is not a sum over tokens."""


def _modern_bert(kind: str) -> PreTrainedModel:
    config = transformers.ModernBertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=0, local_attention=8, global_attn_every_n_layers=2,
    )  # fmt: skip
    return getattr(transformers, kind)._from_config(config, attn_implementation="dcp")


def _refused(model: str, **changes: Any) -> Callable[[], PreTrainedModel]:
    return Family(model, changes).make


BERT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "ModernBERT": (
        lambda: _modern_bert("ModernBertModel"),
        "ModernBertAttention of layer 0 has a mask that is bidirectional",
    ),
    "ModernBERT, masked tokens": (lambda: _modern_bert("ModernBertForMaskedLM"), "has the loss ForMaskedLM"),
    "BERT": (_refused("BertLMHeadModel", **BERT), "BertSelfAttention of layer 0 has a mask that is bidirectional"),
    "RoBERTa, positions from the padding token": (
        _refused("RobertaForCausalLM", is_decoder=True, **BERT),
        "RobertaForCausalLM counts positions from its padding token's id",
    ),
    "DeepSeek-V2, latent attention": (
        _refused("DeepseekV2ForCausalLM", **LATENT, num_key_value_heads=4, first_k_dense_replace=2),
        "has queries, keys and values of 12, 12 and 8 numbers a head",
    ),
    "Mamba": (_refused("MambaForCausalLM"), "MambaForCausalLM does not take its attention|state from token to token"),
    "LFM2, convolutions": (
        _refused("Lfm2ForCausalLM", layer_types=["conv", "full_attention"]),
        "has layers of type conv",
    ),
    "MiniMax, linear attention": (
        _refused("MiniMaxForCausalLM", layer_types=["linear_attention", "full_attention"], **EXPERTS),
        "has layers of type linear_attention",
    ),
    "Llama4, chunks": (
        _refused("Llama4ForCausalLM", attention_chunk_size=8, head_dim=8, pad_token_id=0, intermediate_size_mlp=64),
        "chunked_attention",
    ),
    "Doge, a mask of its own": (_refused("DogeForCausalLM"), "could not be tried out without its weights"),
}
"""Models that must be refused when they are set up, each with the reason."""
