"""The attention interface: calls without a plan equal sdpa, calls with one refuse what they can't honour."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

import hf_dcp
from hf_dcp.integrations.attention import LazyMask, calls, dcp_attention, dcp_mask
from hf_dcp.integrations.models import check_model
from hf_dcp.planning.batch import BatchSpec, Topology
from hf_dcp.planning.planner import plan_batch
from hf_dcp.runtime import DcpPlan
from tests.integrations.small import BASE, VOCABULARY, _random, small_llama, small_qwen

SMALL = BASE | {"head_dim": 16}


def _mistral(attention: str) -> PreTrainedModel:
    return _random(MistralForCausalLM, MistralConfig(**BASE, sliding_window=9), attention, 0)


def _gemma2(attention: str) -> PreTrainedModel:
    return _random(Gemma2ForCausalLM, Gemma2Config(**SMALL, sliding_window=9), attention, 0)


def _gemma3(attention: str) -> PreTrainedModel:
    return _random(Gemma3ForCausalLM, Gemma3TextConfig(**SMALL, sliding_window=9), attention, 0)


def _gpt_oss(attention: str) -> PreTrainedModel:
    config = GptOssConfig(
        **SMALL,
        sliding_window=9,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return _random(GptOssForCausalLM, config, attention, 0)


# Softcap and sinks are beyond sdpa: those models are compared with eager.
FAMILIES = [
    (small_llama, "sdpa"),
    (small_qwen, "sdpa"),
    (_mistral, "sdpa"),
    (_gemma3, "sdpa"),
    (_gemma2, "eager"),
    (_gpt_oss, "eager"),
]


@pytest.mark.parametrize(("make", "stock"), FAMILIES, ids=lambda value: getattr(value, "__name__", value))
def test_without_a_plan_equals_stock(make: Any, stock: str) -> None:
    ours, theirs = make("dcp").eval(), make(stock).eval()
    ids = torch.randint(1, VOCABULARY, (3, 17), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :5], mask[1, 9:] = 0, 0
    packed = torch.cat([torch.arange(9), torch.arange(8)])[None]
    dense = torch.ones(1, 1, 17, 17, dtype=torch.bool).tril()
    dense[..., 3] = False
    dense[..., 3, 3] = True
    dense = torch.where(dense, 0.0, torch.finfo(torch.float32).min)
    before = calls["dense"]
    with torch.no_grad():
        for name, rows, arguments in (
            ("padded", mask.bool(), {"input_ids": ids, "attention_mask": mask}),
            ("whole", None, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}),
            ("plain", None, {"input_ids": ids, "use_cache": False}),
            ("packed", None, {"input_ids": ids[:1], "position_ids": packed, "use_cache": False}),
            ("4-D", None, {"input_ids": ids[:1], "attention_mask": dense}),
        ):
            got, want = ours(**arguments).logits, theirs(**arguments).logits
            difference = (got - want).abs() if rows is None else (got - want)[rows].abs()
            assert float(difference.max()) <= 1e-5, name
    assert calls["dense"] == before + 10  # two layers, five times


@pytest.mark.parametrize(("make", "stock"), FAMILIES, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize(("cache", "padded"), [(None, True), ("static", True), (None, False)])
def test_generation_equals_stock(make: Any, stock: str, cache: str | None, padded: bool) -> None:
    ids = torch.randint(1, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0 if padded else 1
    arguments = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
    arguments |= {"return_dict_in_generate": True, "output_logits": True, "disable_compile": True}
    got, want = (m.eval().generate(ids, attention_mask=mask, **arguments) for m in (make("dcp"), make(stock)))
    assert torch.equal(got.sequences, want.sequences)
    assert max(float((a - b).abs().max()) for a, b in zip(got.logits, want.logits)) <= 1e-5


def _planned(model: PreTrainedModel, lengths: list[int], masks: Any = None) -> DcpPlan:
    batch = BatchSpec(lengths, masks or hf_dcp.causal())
    return DcpPlan(plan_batch(batch, Topology((0,)), check_model(model), hf_dcp.DcpConfig(block_size=8)).rank(0))


@pytest.mark.parametrize("make", [small_llama, small_qwen, _mistral, _gemma2, _gemma3, _gpt_oss])
def test_with_a_plan_no_mask_is_built(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = make("dcp").eval(), make("eager").eval()
    ids = torch.randint(1, VOCABULARY, (1, 33), generator=torch.Generator().manual_seed(2))
    lengths = [20, 13]
    monkeypatch.setattr(LazyMask, "build", lambda *_: pytest.fail("a mask was built"))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        got = ours(input_ids=ids, position_ids=positions, dcp_plan=_planned(ours, lengths), use_cache=False).logits
        want = torch.cat([theirs(input_ids=part, use_cache=False).logits for part in ids.split(lengths, 1)], 1)
    assert float((got - want).abs().max()) <= 1e-5


def _call(plan: Any, mask: Any = None, **arguments: Any) -> Any:
    q = torch.randn(1, 4, 8, 8)
    return dcp_attention(torch.nn.Module(), q, q[:, :2], q[:, :2], mask, dcp_plan=plan, **arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"dropout": 0.1}, "dropout is 0.1"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"output_attentions": True}, "output_attentions"),
        ({"mask": torch.ones(1, 1, 8, 8)}, "attention_mask beside dcp_plan"),
        ({"mask": dcp_mask(use_vmap=True)}, "function of its own"),
        ({"mask": dcp_mask(local_size=4), "sliding_window": 5}, "sliding_window 5"),
        ({"sliding_window": 5}, "no part for sliding window 5"),
    ],
)
def test_what_a_plan_cannot_honour_is_refused(arguments: dict[str, Any], text: str) -> None:
    plan = _planned(small_llama(), [8])
    _call(plan)
    with pytest.raises(ValueError, match=text):
        _call(plan, **arguments)


def test_padding_beside_a_plan_is_refused() -> None:
    model = small_llama()
    ids, mask = torch.arange(8)[None], torch.ones(1, 8, dtype=torch.long)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="attention_mask beside dcp_plan"):
        model(input_ids=ids, position_ids=ids, attention_mask=mask, dcp_plan=_planned(model, [8]), use_cache=False)


def test_autocast_reaches_attention() -> None:
    model = small_llama()
    batch = BatchSpec([8], hf_dcp.causal())
    shape = check_model(model, torch.bfloat16)
    plan = DcpPlan(plan_batch(batch, Topology((0,)), shape, hf_dcp.DcpConfig(block_size=8)).rank(0))
    ids = torch.arange(8)[None]
    with torch.autocast("cpu", torch.bfloat16):
        got = model(input_ids=ids, position_ids=ids, dcp_plan=plan, use_cache=False).logits
    want = small_llama("sdpa")(input_ids=ids).logits
    assert float((got - want).detach().abs().max()) < 0.05


def test_changing_one_document_leaves_the_other_to_the_bit() -> None:
    model = small_llama().eval()
    plan = _planned(model, [16], hf_dcp.documents([9, 7]))
    positions = torch.from_numpy(np.concatenate([np.arange(9), np.arange(7)]))[None]
    ids = torch.arange(1, 17)[None]
    changed = ids.clone()
    changed[0, 2] = 50
    with torch.no_grad():
        a, b = (
            model(input_ids=x, position_ids=positions, dcp_plan=plan, use_cache=False).logits for x in (ids, changed)
        )
    assert torch.equal(a[:, 9:], b[:, 9:]) and not torch.equal(a[:, :9], b[:, :9])
