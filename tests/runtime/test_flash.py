"""FlashAttention: arguments under fake tensors, the rule for taking it, the stand-in for the output."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from hf_dcp.planning.planner import plan_batch
from hf_dcp.runtime.cases import Case
from hf_dcp.runtime.kernels import flash
from hf_dcp.runtime.kernels.segments import Segment, build_segments
from hf_dcp.runtime.selftest import MASKS


def fake_library(seen):
    """The varlen functions by their shapes alone, as flash-attn 2.8 registers them for fake tensors."""

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, **named):
        seen.append((named["window_size_left"], named["window_size_right"], tuple(q.shape), tuple(k.shape)))
        assert named["window_size_left"] >= -1 and named["window_size_right"] >= -1
        assert isinstance(max_q, int) and isinstance(max_k, int) and cu_q.shape == cu_k.shape
        return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32), None, None

    def backward(dout, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, max_q, max_k, **named):
        assert dout.shape == q.shape == out.shape == dq.shape and dk.shape == k.shape == dv.shape
        assert lse.shape == (q.shape[1], q.shape[0]) and lse.is_contiguous() and named["deterministic"]

    return SimpleNamespace(_flash_attn_varlen_forward=forward, _flash_attn_varlen_backward=backward)


@pytest.mark.parametrize("mask", MASKS)
def test_arguments_under_fake_tensors(mask, monkeypatch):
    seen = []
    monkeypatch.setattr(flash, "library", lambda: fake_library(seen))
    case = Case(mask, (150, 37), 16, dtype="bf16")
    plan = plan_batch(case.batch, case.topology(1), case.shape(), case.config()).rank(0)
    part = plan.window(None)
    segments = build_segments(plan, part, np.arange(len(part.items)))
    calls = flash.flash_calls(plan, segments, torch.device("cpu"))
    heads, kv_heads = 8 // plan.head_groups, 2 // plan.head_groups
    assert sum(call.q.count for call in calls) == sum(s.rows for s in segments)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for call in calls:
            q = torch.empty((call.q.count, heads, 16), dtype=torch.bfloat16)
            k, v = (torch.empty((call.kv.count, kv_heads, 16), dtype=torch.bfloat16) for _ in range(2))
            out, lse = call.forward(q, k, v, 0.25, None)
            assert out.shape == q.shape and lse.shape == q.shape[:2] and lse.dtype == torch.float32
            shares = call.backward(out, q, k, v, out, lse, 0.25, 2.0)
            assert [x.shape for x in shares] == [x.shape for x in (q, k, v)]
    assert len(seen) == len(calls) > 0


def test_lse_of_rows_without_columns_becomes_minus_infinity(monkeypatch):
    lse = torch.tensor([[1.0, float("inf"), 3.0]])
    library = SimpleNamespace(_flash_attn_varlen_forward=lambda q, *_, **__: (q, lse, None, None))
    monkeypatch.setattr(flash, "library", lambda: library)
    call = flash.FlashCall((0, 0), None, None, None, None, 1, 1)
    assert call.forward(torch.zeros(3, 1, 4), None, None, 1.0, None)[1].flatten().tolist() == [1.0, float("-inf"), 3.0]


def test_the_rule_takes_large_slices():
    large, small = Segment(0, 0, 1024, 0, 1024, -1, 0), Segment(0, 0, 64, 0, 1024, -1, -1)
    assert flash.worth([large]) and not flash.worth([small]) and not flash.worth([])
    assert not flash.worth([large] + 3 * [small])


@pytest.mark.parametrize("dtype,bound", [(torch.bfloat16, 2.0**-15), (torch.float16, 2.0**-19)])
def test_stand_in_keeps_row_sums_better_than_one_rounding(dtype, bound):
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(200, 3, 64, generator=generator).to(dtype)
    grad[7] = 0
    delta = torch.randn(200, 3, generator=generator)
    delta[7] = 0
    got = (grad.double() * flash.stand_in(grad, delta).double()).sum(-1)
    assert float((got - delta).abs().max()) <= bound * float(delta.abs().max())
