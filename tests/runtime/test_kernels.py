"""The CPU kernels over one rectangle, and the merging of their results, against fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_dcp.runtime.calls import MaskSpec
from hf_dcp.runtime.kernels import aten, dense
from hf_dcp.runtime.kernels.masks import MaskCache
from hf_dcp.runtime.kernels.merge import merge

ROWS, COLUMNS, SCALE = 37, 50, 0.3
# Rows 0 ... 9 attend to nothing; row 10 + i attends to columns [i, i + 20).
SPEC = MaskSpec(ROWS, COLUMNS, ((10, ROWS, 0, 20, 1, 1, 0, COLUMNS),))


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, ROWS, 16), (2, COLUMNS, 16), (2, COLUMNS, 16), (4, ROWS, 16))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def reference(q, k, v, allowed, softcap=None):
    """(out, lse) in plain fp64, -inf and 0 for rows without columns."""
    k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    scores = q @ k.transpose(1, 2) * SCALE
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed, float("-inf"))
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v, scores.logsumexp(-1)


def run(q, k, v, mask, softcap=None):
    if softcap is None:
        out, lse = aten.forward(q[None], k[None], v[None], scale=SCALE, causal=False, mask=mask)
        return out[0], lse[0]
    return dense.forward(q, k, v, scale=SCALE, softcap=softcap, causal=False, mask=mask)


def test_mask_spec_says_what_it_says():
    row, column = np.arange(ROWS)[:, None], np.arange(COLUMNS)
    assert np.array_equal(SPEC.build(), (row >= 10) & (column >= row - 10) & (column < row + 10))


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_rows_without_columns_have_lse_minus_infinity(softcap):
    q, k, v, _ = inputs()
    mask = MaskCache(torch.float64, torch.device("cpu")).get(SPEC)
    out, lse = run(q, k, v, mask, softcap)
    want, want_lse = reference(q, k, v, torch.from_numpy(SPEC.build()), softcap)
    assert torch.equal(lse[:, :10], torch.full((4, 10), float("-inf"), dtype=torch.float64))
    torch.testing.assert_close((out, lse), (want, want_lse), rtol=1e-12, atol=1e-12)


def test_the_kernel_itself_says_zero_there():
    """Why `aten.forward` has to correct it: if this fails, torch has changed and the correction can go."""
    q, k, v, _ = inputs()
    mask = MaskCache(torch.float64, torch.device("cpu")).get(SPEC)
    _, lse = aten._forward(q[None], k[None], v[None], 0.0, False, attn_mask=mask.additive, scale=SCALE)
    assert bool((lse[0, :, :10] == 0).all())


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_merged_parts_are_the_whole(softcap):
    q, k, v, _ = inputs()
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], float("-inf"), dtype=q.dtype)
    for columns in (slice(0, 20), slice(20, 21), slice(21, COLUMNS)):
        merge(out, lse, *run(q, k[:, columns], v[:, columns], None, softcap))
    want = reference(q, k, v, torch.ones(ROWS, COLUMNS, dtype=torch.bool), softcap)
    torch.testing.assert_close((out, lse), want, rtol=1e-12, atol=1e-12)


def test_merging_nothing_with_nothing_is_nothing():
    out, lse = torch.zeros(2, 3, 4), torch.full((2, 3), float("-inf"))
    merge(out, lse, torch.zeros(2, 3, 4), torch.full((2, 3), float("-inf")))
    assert bool((out == 0).all()) and bool((lse == float("-inf")).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stand_in_has_the_right_row_sums(dtype):
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(50, 4, 16, generator=generator, dtype=dtype)
    grad[3] = 0
    grad[4] *= 1e-30
    out = torch.randn(grad.shape, generator=generator, dtype=dtype)
    delta = (grad.double() * out.double()).sum(-1)
    stand_in = aten.stand_in(grad, delta.to(dtype))
    error = ((grad.double() * stand_in.double()).sum(-1) - delta).abs()
    assert bool((error <= 4 * torch.finfo(dtype).eps * delta.abs()).all())
    assert bool(stand_in.isfinite().all())


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("without_output", [False, True])
def test_backward_of_parts_adds_up(softcap, without_output):
    q, k, v, grad = inputs()
    allowed = torch.from_numpy(SPEC.build())
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = reference(*leaves, allowed, softcap)
    want = torch.autograd.grad(out, leaves, grad)
    out, lse = out.detach(), torch.where(lse.detach() == float("-inf"), float("inf"), lse.detach())
    delta = (grad * out).sum(-1)
    total = [torch.zeros_like(x) for x in (q, k, v)]
    cache = MaskCache(torch.float64, torch.device("cpu"))
    for begin, end in ((0, 20), (20, COLUMNS)):
        piece = MaskSpec(ROWS, end - begin, ((10, ROWS, -begin, 20 - begin, 1, 1, 0, end - begin),))
        mask = cache.get(piece)
        if softcap is None:
            given = aten.stand_in(grad, delta) if without_output else out
            some = (x[None] for x in (grad, q, k[:, begin:end], v[:, begin:end], given, lse))
            part = [x[0] for x in aten.backward(*some, scale=SCALE, causal=False, mask=mask)]
        else:
            part = dense.backward(
                grad,
                q,
                k[:, begin:end],
                v[:, begin:end],
                delta,
                lse,
                scale=SCALE,
                softcap=softcap,
                causal=False,
                mask=mask,
            )
        total[0] += part[0]
        total[1][:, begin:end] += part[1]
        total[2][:, begin:end] += part[2]
    torch.testing.assert_close(tuple(total), want, rtol=1e-11, atol=1e-11)


def test_dense_kernel_in_chunks(monkeypatch):
    monkeypatch.setattr(dense, "CHUNK", 7)
    q, k, v, _ = inputs()
    q = q[:, :30].contiguous()
    out, lse = dense.forward(q, k[:, :30], v[:, :30], scale=SCALE, softcap=2.0, causal=True, mask=None)
    want = reference(q, k[:, :30], v[:, :30], torch.ones(30, 30, dtype=torch.bool).tril(), 2.0)
    torch.testing.assert_close((out, lse), want, rtol=1e-12, atol=1e-12)
