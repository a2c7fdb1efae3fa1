"""Forward over tile lists, merged into what earlier divisions have left."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_dcp.runtime.kernels.triton_common import (
    LN2,
    LOG2E,
    base_of,
    bounds_of,
    capped,
    dot,
    load_rows,
    load_sums,
    offsets_of,
    pointers,
    store_sums,
)


@triton.jit
def forward_tile(
    entry, m, z, acc1, acc2, q1, q2, k_local, k_remote, k_table, v_local, v_remote, v_table, ranges, token, valid,
    num_local, k_row, v_row, k_shift, v_shift, remote_shift, scale, softcap,
    T: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, UNIT: tl.constexpr,
    CAPPED: tl.constexpr, EXACT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Softmax state (m, z, acc) after one more tile; m counts in units of log2."""
    place = tl.load(entry)
    column = tl.arange(0, BN)
    inside = column < tl.load(entry + 1) if MASKED else column < BN
    k_at = offsets_of(k_table, place + column, inside, num_local, k_row, k_shift, remote_shift, UNIT)
    v_at = offsets_of(v_table, place + column, inside, num_local, v_row, v_shift, remote_shift, UNIT)
    k_base = base_of(k_local, k_remote, place, num_local)
    v_base = base_of(v_local, v_remote, place, num_local)
    s = dot(q1, tl.trans(load_rows(k_base, k_at, inside, 0, D1, MASKED)), EXACT)
    if D2 > 0:
        s += dot(q2, tl.trans(load_rows(k_base, k_at, inside, D1, D2, MASKED)), EXACT)
    s *= scale
    if CAPPED:
        s = capped(s, softcap)[0]
    s *= LOG2E
    if MASKED:
        first, end = bounds_of(ranges, entry, token, valid, T)
        s = tl.where((column[None, :] >= first[:, None]) & (column[None, :] < end[:, None]), s, float("-inf"))
    top = tl.maximum(m, tl.max(s, 1))
    safe = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(s - safe[:, None])
    alpha = tl.exp2(m - safe)
    z = z * alpha + tl.sum(p, 1)
    v1 = load_rows(v_base, v_at, inside, 0, D1, MASKED)
    p = p.to(v1.dtype)
    acc1 = acc1 * alpha[:, None] + dot(p, v1, EXACT)
    if D2 > 0:
        acc2 = acc2 * alpha[:, None] + dot(p, load_rows(v_base, v_at, inside, D1, D2, MASKED), EXACT)
    return top, z, acc1, acc2


@triton.jit(do_not_specialize=["num_local"])
def forward(
    q_local, q_remote, q_table, k_local, k_remote, k_table, v_local, v_remote, v_table,
    out_local, out_remote, lse_local, lse_remote, blocks, entries, ranges, num_local, kv_heads, h,
    q_head, q_row, k_head, k_row, v_head, v_row, out_head, out_row, lse_head, lse_row, scale, softcap,
    PACK: tl.constexpr, T: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, UNIT: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Attention of a Q block's rows over its tiles, merged into (out, lse) of these rows.

    Grid: (Q blocks, KV heads of a group * h / PACK); h query heads per KV head.
    """
    D: tl.constexpr = D1 + D2
    block = blocks + tl.program_id(0) * 6
    kv_head = tl.program_id(1) // (h // PACK)
    place, count, group = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    row = tl.arange(0, BM)
    token, head = row // PACK, kv_head * h + tl.program_id(1) % (h // PACK) * PACK + row % PACK
    valid = token < count
    heads = kv_heads * h
    all_head = group * heads + head
    q_at = offsets_of(q_table, place + token, valid, num_local, q_row, all_head * q_head, head * D, UNIT)
    q_base = base_of(q_local, q_remote, place, num_local)
    q1 = load_rows(q_base, q_at, valid, 0, D1, True)
    q2 = load_rows(q_base, q_at, valid, D1, D2, True) if D2 > 0 else q1
    all_kv = group * kv_heads + kv_head
    there = (place + token - num_local - 1) * heads + head
    here = place + token
    lse_at = pointers(lse_local, lse_remote, place, num_local, there, all_head * lse_head + here * lse_row)
    out_at = pointers(out_local, out_remote, place, num_local, there * D, all_head * out_head + here * out_row)
    # A normalised partial result is a softmax state: its lse the maximum, its sum 1. So nothing is left to merge.
    m = tl.load(lse_at, mask=valid, other=float("-inf")) * LOG2E
    z = tl.where(m == float("-inf"), 0.0, 1.0)
    acc1 = load_sums(out_at, valid, 1.0, 0, D1)
    acc2 = load_sums(out_at, valid, 1.0, D1, D2) if D2 > 0 else tl.zeros((BM, 16), tl.float32)
    begin, masked, end = tl.load(block + 3), tl.load(block + 4), tl.load(block + 5)
    for e in range(begin, masked):
        m, z, acc1, acc2 = forward_tile(
            entries + e * 3, m, z, acc1, acc2, q1, q2, k_local, k_remote, k_table, v_local, v_remote, v_table, ranges,
            token, valid, num_local, k_row, v_row, all_kv * k_head, all_kv * v_head, kv_head * D, scale, softcap,
            T, BM, BN, D1, D2, UNIT, CAPPED, EXACT, False,
        )  # fmt: skip
    for e in range(masked, end):
        m, z, acc1, acc2 = forward_tile(
            entries + e * 3, m, z, acc1, acc2, q1, q2, k_local, k_remote, k_table, v_local, v_remote, v_table, ranges,
            token, valid, num_local, k_row, v_row, all_kv * k_head, all_kv * v_head, kv_head * D, scale, softcap,
            T, BM, BN, D1, D2, UNIT, CAPPED, EXACT, True,
        )  # fmt: skip
    some = tl.where(z > 0, z, 1.0)
    tl.store(lse_at, tl.where(z > 0, (m + tl.log2(some)) * LN2, float("-inf")), mask=valid)
    store_sums(out_at, acc1 / some[:, None], valid, 0, D1)
    if D2 > 0:
        store_sums(out_at, acc2 / some[:, None], valid, D1, D2)
