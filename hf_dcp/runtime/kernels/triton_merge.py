"""Merging partial results that came from other ranks, and the final reduction of the local rows."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_dcp.runtime.kernels.triton_common import pointers


@triton.jit
def merged(lse, part):
    """Weights of what is there and of a further part, and the lse of both."""
    top = tl.maximum(lse, part)
    safe = tl.where(top == float("-inf"), 0.0, top)
    keep, add = tl.exp(lse - safe), tl.exp(part - safe)
    total = tl.where(keep + add > 0, keep + add, 1.0)
    return keep / total, add / total, tl.where(top == float("-inf"), top, top + tl.log(total))


@triton.jit(do_not_specialize=["count", "num_local"])
def merge_rows(
    part, part_lse, rows, out_local, out_remote, lse_local, lse_remote, count, num_local, heads,
    out_head, out_row, lse_head, lse_row, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Merge received partial results, part [count, heads, D] and part_lse [count, heads], into (out, lse).

    Grid: (count / N, heads of a group). ``rows`` [count, 2]: place and head group of each.
    """
    n = tl.program_id(0) * N + tl.arange(0, N)
    head, valid = tl.program_id(1), n < count
    place = tl.load(rows + 2 * n, mask=valid, other=0)
    all_head = (tl.load(rows + 2 * n + 1, mask=valid, other=0) * heads + head).to(tl.int64)
    there, here = (place - num_local - 1).to(tl.int64) * heads + head, place.to(tl.int64)
    lse_at = pointers(lse_local, lse_remote, place, num_local, there, all_head * lse_head + here * lse_row)
    out_at = pointers(out_local, out_remote, place, num_local, there * D, all_head * out_head + here * out_row)
    d = tl.arange(0, DP)[None, :]
    at = n.to(tl.int64) * heads + head
    keep, add, lse = merged(
        tl.load(lse_at, mask=valid, other=0.0), tl.load(part_lse + at, mask=valid, other=float("-inf"))
    )
    inside = valid[:, None] & (d < D)
    new = tl.load(part + at[:, None] * D + d, mask=inside, other=0.0).to(tl.float32)
    old = tl.load(out_at[:, None] + d, mask=inside, other=0.0)
    tl.store(out_at[:, None] + d, old * keep[:, None] + new * add[:, None], mask=inside)
    tl.store(lse_at, lse, mask=valid)


@triton.jit(do_not_specialize=["count"])
def finish_rows(
    out, lse, sinks, result, count, out_head, out_row, lse_head, lse_row, result_head, result_row,
    SINKS: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """The local rows in the type of the result, with the sink in their softmax; lse in place. Grid: (rows / N, heads)."""
    n = tl.program_id(0) * N + tl.arange(0, N)
    head, valid = tl.program_id(1).to(tl.int64), n < count
    n = n.to(tl.int64)
    d = tl.arange(0, DP)[None, :]
    inside = valid[:, None] & (d < D)
    value = tl.load(out + head * out_head + n[:, None] * out_row + d, mask=inside, other=0.0)
    if SINKS:
        lse_at = lse + head * lse_head + n * lse_row
        sink = tl.load(sinks + head).to(tl.float32)
        keep, _, total = merged(tl.load(lse_at, mask=valid, other=0.0), sink)
        value *= keep[:, None]
        tl.store(lse_at, total, mask=valid)
    at = result + head * result_head + n[:, None] * result_row + d
    tl.store(at, value.to(result.dtype.element_ty), mask=inside)
