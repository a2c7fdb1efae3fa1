"""What is read from models, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    MptConfig,
    MptForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_dcp.integrations.models import check_model, find_models
from hf_dcp.integrations.router import router_coefficient
from hf_dcp.integrations.versions import BEFORE, OLDEST, check_versions
from tests.integrations.small import BASE, small_llama, small_qwen


def test_shape_of_a_model() -> None:
    shape = check_model(small_llama())
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.dtype) == (4, 2, 8, "fp32")
    assert shape.windows == ((None, 2),)
    assert check_model(small_qwen()).windows == ((None, 1), (7, 1))
    assert check_model(small_llama().bfloat16()).dtype == "bf16"
    assert check_model(small_llama(), torch.bfloat16).dtype == "bf16"
    assert check_model(torch.nn.parallel.DataParallel(small_llama())).heads == 4


def _from(kind: Any, config: Any, attention: str = "dcp") -> Any:
    return kind._from_config(config, attn_implementation=attention)


SMALL = {"vocab_size": 97, "hidden_size": 32}
REFUSED = {
    "BloomForCausalLM": lambda: _from(BloomForCausalLM, BloomConfig(**SMALL, n_layer=2, n_head=4)),
    "attn_pdrop=0.1": lambda: _from(GPT2LMHeadModel, GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4)),
    "attention_dropout=0.25": lambda: small_llama(attention_dropout=0.25),
    'attn_implementation="sdpa"': lambda: small_llama("sdpa"),
    "encoder-decoder|does not take its attention": lambda: _from(
        T5ForConditionalGeneration, T5Config(vocab_size=97, d_model=32, d_ff=64, num_layers=1, num_heads=4, d_kv=8)
    ),
    "trains causal language models": lambda: _from(LlamaForSequenceClassification, LlamaConfig(**BASE, pad_token_id=0)),
    "no model of Transformers": lambda: torch.nn.Linear(2, 2),
}


@pytest.mark.parametrize("text", REFUSED)
def test_models_that_dcp_cannot_run_are_refused(text: str) -> None:
    model = REFUSED[text]()
    with pytest.raises(ValueError, match=text):
        check_model(model)


@pytest.mark.parametrize(
    ("kind", "config"),
    [(FalconForCausalLM, FalconConfig(**SMALL, num_hidden_layers=2, num_attention_heads=4)), (MptForCausalLM, None)],
)
def test_models_that_cannot_be_built_with_dcp_are_refused_with_another_attention(kind: Any, config: Any) -> None:
    """Transformers itself fails to build them with an attention function that is not its own."""
    config = config or MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=97)
    model = kind._from_config(config, attn_implementation="eager")
    with pytest.raises(ValueError, match="does not take its attention"):
        check_model(model)


def test_heads_are_those_of_a_tensor_parallel_rank() -> None:
    model = small_llama()
    model._tp_size = 2
    shape = check_model(model)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (2, 1, 8)
    model._tp_size = 3
    with pytest.raises(ValueError, match="4 heads and 2 KV heads, which 3 tensor parallel ranks can't divide"):
        check_model(model)


def test_a_router_loss_of_another_kind_is_refused() -> None:
    config = MixtralConfig(**BASE, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    model = _from(MixtralForCausalLM, config)
    assert router_coefficient(model) == config.router_aux_loss_coef
    other = small_llama()
    other.config.output_router_logits, other.config.router_aux_loss_coef = True, 0.1
    with pytest.raises(ValueError, match="LlamaForCausalLM adds a router loss that is not Mixtral's"):
        router_coefficient(other)


def test_a_model_is_tried_out_without_memory_or_weights() -> None:
    """As large as a model of 70 billion parameters; it would not fit here."""
    with torch.device("meta"):
        sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 3, "num_attention_heads": 64}
        model = _from(LlamaForCausalLM, LlamaConfig(**sizes, num_key_value_heads=8))
    shape = check_model(model)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.windows) == (64, 8, 128, ((None, 3),))


def test_dropout_of_hidden_states_is_allowed() -> None:
    config = OPTConfig(
        vocab_size=97,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        dropout=0.1,
        attention_dropout=0.0,
        word_embed_proj_dim=32,
    )
    assert check_model(_from(OPTForCausalLM, config)).heads == 4


def test_models_of_the_process_are_found() -> None:
    model, _other = small_llama(), small_llama("sdpa")
    assert any(found is model or check_model(found) == check_model(model) for found in find_models())


def test_versions_are_checked() -> None:
    good = {"torch": "2.13.0+cpu", "transformers": "5.24.0.dev0", "accelerate": "1.15.0"}
    check_versions(good)
    with pytest.raises(
        ImportError, match=r'needs transformers 5\.\d+ or newer, found 4.57.1: pip install "transformers>=5'
    ):
        check_versions(good | {"transformers": "4.57.1"})
    with pytest.raises(ImportError, match=r"needs accelerate before 2, found 2.0.1: pip install"):
        check_versions(good | {"accelerate": "2.0.1"})


def test_pins_are_those_that_are_checked() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    pins = tomllib.loads(text)["project"]["dependencies"]
    for name, least in OLDEST.items():
        wanted = f"{name}>={'.'.join(map(str, least))},<{'.'.join(map(str, BEFORE[name]))}"
        assert wanted in pins, wanted
