"""What Transformers' own tests ask of Llama and Qwen2 where attention takes part, with "dcp" and no plan against sdpa.

The wheel and the source archive of Transformers have no tests of single models, so these are tests of the same behaviours:
generation in its ways, padding, caches, masks, training, switching of the attention.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from hf_dcp.integrations.attention import calls
from tests.integrations.small import IGNORE, VOCABULARY, gradients, relative_error, small_llama, small_qwen

MODELS = pytest.mark.parametrize("make", [small_llama, small_qwen], ids=lambda make: make.__name__)
WINDOW = 7  # of the Qwen2


def ids(rows: int = 2, length: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(side: str, rows: int = 2, length: int = 12) -> dict[str, Tensor]:
    tokens = ids(rows, length)
    mask = torch.ones_like(tokens)
    mask[0, slice(0, 5) if side == "left" else slice(-5, None)] = 0
    return {"input_ids": tokens * mask, "attention_mask": mask}


def pair(make: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    return make("dcp").eval(), make("sdpa").eval()


GENERATION: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beams, sampled": {"num_beams": 2, "do_sample": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "offloaded prefill": {"prefill_chunk_size": 4},
    "beyond the window": {"max_new_tokens": 3 * WINDOW},
    "penalty": {"repetition_penalty": 1.3},
}


@MODELS
@pytest.mark.parametrize("way", GENERATION)
def test_generation(make: Any, way: str) -> None:
    arguments = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "eos_token_id": 1} | GENERATION[way]
    if way == "prompt lookup":  # one row only
        inputs: dict[str, Tensor] = {"input_ids": torch.cat([ids(1, 6), ids(1, 6)], 1)}
    else:
        inputs = padded("left")
    sequences = []
    for model in pair(make):
        torch.manual_seed(0)
        sequences.append(model.generate(**inputs, **arguments))
    assert torch.equal(*sequences)
    assert sequences[0].shape[1] > inputs["input_ids"].shape[1]


@MODELS
def test_generation_from_embeddings(make: Any) -> None:
    ours, theirs = pair(make)
    arguments = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    embedded = ours.get_input_embeddings()(ids())
    got, want, tokens = (m.generate(**x, **arguments) for m, x in (
        (ours, {"inputs_embeds": embedded}), (theirs, {"inputs_embeds": embedded}), (ours, {"input_ids": ids()})
    ))  # fmt: skip
    assert torch.equal(got, want) and torch.equal(got, tokens[:, -6:])


@MODELS
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding(make: Any, side: str, dtype: torch.dtype) -> None:
    ours, theirs = (model.to(dtype) for model in pair(make))
    batch = padded(side)
    with torch.no_grad():
        got, want = (model(**batch).logits for model in (ours, theirs))
    rows = batch["attention_mask"].bool()
    assert torch.allclose(got[rows], want[rows], atol=1e-5 if dtype == torch.float32 else 2e-2)


@MODELS
def test_left_padding_changes_nothing(make: Any) -> None:
    model, tokens = make("dcp").eval(), ids(1, 7)
    more = {"input_ids": torch.cat([torch.zeros(1, 4, dtype=torch.long), tokens], 1)}
    more["attention_mask"] = (torch.arange(11) >= 4).long()[None]
    more["position_ids"] = (torch.arange(11) - 4).clamp(min=0)[None]
    with torch.no_grad():
        assert torch.allclose(model(**more).logits[:, 4:], model(input_ids=tokens).logits, atol=1e-5)


@MODELS
@pytest.mark.parametrize("cut", [1, 5, 11])
def test_a_cache_continues_a_text(make: Any, cut: int) -> None:
    ours, theirs = pair(make)
    tokens = ids()
    with torch.no_grad():
        for model in (ours, theirs):
            first = model(input_ids=tokens[:, :cut], use_cache=True, past_key_values=DynamicCache(config=model.config))
            rest = model(input_ids=tokens[:, cut:], past_key_values=first.past_key_values, use_cache=True)
            logits = torch.cat([first.logits, rest.logits], 1)
            assert torch.allclose(logits, theirs(input_ids=tokens, use_cache=False).logits, atol=1e-5)


@MODELS
def test_padding_and_cache_together(make: Any) -> None:
    batch, logits = padded("left"), []
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    for model in pair(make):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            parts = []
            for span in (slice(0, 8), slice(8, 12)):
                mask = batch["attention_mask"][:, : span.stop]
                out = model(input_ids=batch["input_ids"][:, span], attention_mask=mask, position_ids=positions[:, span],
                            past_key_values=cache, use_cache=True)  # fmt: skip
                parts.append(out.logits)
        logits.append(torch.cat(parts, 1)[batch["attention_mask"].bool()])
    assert torch.allclose(*logits, atol=1e-5)


@MODELS
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_training_without_a_plan(make: Any, reentrant: bool | None) -> None:
    found = []
    for model in (make("dcp"), make("sdpa")):
        model.train()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        batch = padded("right")
        labels = torch.where(batch["attention_mask"].bool(), batch["input_ids"], IGNORE)
        model(**batch, labels=labels, use_cache=False).loss.backward()
        found.append(gradients(model))
    assert relative_error(*found) <= 1e-6


@MODELS
def test_saved_and_loaded_with_another_attention(make: Any, tmp_path: Path) -> None:
    model = make("dcp").eval()
    model.save_pretrained(tmp_path)
    assert '"dcp"' not in (tmp_path / "config.json").read_text()
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="dcp")
    assert stock.config._attn_implementation == "sdpa" and ours.config._attn_implementation == "dcp"
    with torch.no_grad():
        assert torch.allclose(ours(input_ids=ids()).logits, stock(input_ids=ids()).logits, atol=1e-5)


@MODELS
def test_the_attention_can_be_switched(make: Any) -> None:
    model = make("sdpa").eval()
    with torch.no_grad():
        want = model(input_ids=ids()).logits
        for name in ("dcp", "eager", "dcp", "sdpa"):
            model.set_attn_implementation(name)
            before = calls["dense"]
            assert torch.allclose(model(input_ids=ids()).logits, want, atol=1e-5)
            assert (calls["dense"] > before) == (name == "dcp")


@MODELS
def test_the_vocabulary_can_be_resized(make: Any) -> None:
    ours, theirs = pair(make)
    for model in (ours, theirs):
        torch.manual_seed(0)
        model.resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)
    with torch.no_grad():
        got, want = (model(input_ids=ids()).logits for model in (ours, theirs))
    assert got.shape[-1] == VOCABULARY + 5 and torch.allclose(got[..., :VOCABULARY], want[..., :VOCABULARY], atol=1e-5)


@MODELS
def test_hidden_states_and_logits_to_keep(make: Any) -> None:
    ours, theirs = pair(make)
    with torch.no_grad():
        got, want = (m(input_ids=ids(), output_hidden_states=True, logits_to_keep=3) for m in (ours, theirs))
    assert got.logits.shape[1] == 3 and len(got.hidden_states) == len(want.hidden_states)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got.hidden_states, want.hidden_states))
