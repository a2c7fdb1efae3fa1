"""The gradient of Q over tile lists."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_dcp.runtime.kernels.triton_common import (
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
def dq_tile(
    entry, dq1, dq2, q1, q2, g1, g2, lse, delta, k_local, k_remote, k_table, v_local, v_remote, v_table, ranges, token,
    valid, num_local, k_row, v_row, k_shift, v_shift, remote_shift, scale, softcap,
    T: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, UNIT: tl.constexpr,
    CAPPED: tl.constexpr, EXACT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dQ (without the factor ``scale``) after one more tile; ``lse`` in units of log2."""
    place = tl.load(entry)
    column = tl.arange(0, BN)
    inside = column < tl.load(entry + 1) if MASKED else column < BN
    k_at = offsets_of(k_table, place + column, inside, num_local, k_row, k_shift, remote_shift, UNIT)
    v_at = offsets_of(v_table, place + column, inside, num_local, v_row, v_shift, remote_shift, UNIT)
    k_base = base_of(k_local, k_remote, place, num_local)
    v_base = base_of(v_local, v_remote, place, num_local)
    k1 = load_rows(k_base, k_at, inside, 0, D1, MASKED)
    s = dot(q1, tl.trans(k1), EXACT)
    dp = dot(g1, tl.trans(load_rows(v_base, v_at, inside, 0, D1, MASKED)), EXACT)
    k2 = k1
    if D2 > 0:
        k2 = load_rows(k_base, k_at, inside, D1, D2, MASKED)
        s += dot(q2, tl.trans(k2), EXACT)
        dp += dot(g2, tl.trans(load_rows(v_base, v_at, inside, D1, D2, MASKED)), EXACT)
    s *= scale
    tanh = s
    if CAPPED:
        s, tanh = capped(s, softcap)
    p = tl.exp2(s * LOG2E - lse[:, None])
    if MASKED:
        first, end = bounds_of(ranges, entry, token, valid, T)
        p = tl.where((column[None, :] >= first[:, None]) & (column[None, :] < end[:, None]), p, 0.0)
    ds = p * (dp - delta[:, None])
    if CAPPED:
        ds *= 1 - tanh * tanh
    ds = ds.to(k1.dtype)
    dq1 += dot(ds, k1, EXACT)
    if D2 > 0:
        dq2 += dot(ds, k2, EXACT)
    return dq1, dq2


@triton.jit(do_not_specialize=["num_local"])
def dq(
    q_local, q_remote, q_table, g_local, g_remote, g_table, k_local, k_remote, k_table, v_local, v_remote, v_table,
    lse_local, lse_remote, delta_local, delta_remote, dq_local, dq_remote, blocks, entries, ranges, num_local, kv_heads, h,
    q_head, q_row, g_head, g_row, k_head, k_row, v_head, v_row, lse_head, lse_row, delta_head, delta_row,
    dq_head, dq_row, scale, softcap,
    PACK: tl.constexpr, T: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, UNIT: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Gradient of a Q block's rows over its tiles, added to dQ. Grid: as `forward`. ``g`` is the output's gradient."""
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
    g_at = offsets_of(g_table, place + token, valid, num_local, g_row, all_head * g_head, head * D, UNIT)
    q_base = base_of(q_local, q_remote, place, num_local)
    g_base = base_of(g_local, g_remote, place, num_local)
    q1, g1 = load_rows(q_base, q_at, valid, 0, D1, True), load_rows(g_base, g_at, valid, 0, D1, True)
    q2 = load_rows(q_base, q_at, valid, D1, D2, True) if D2 > 0 else q1
    g2 = load_rows(g_base, g_at, valid, D1, D2, True) if D2 > 0 else g1
    there = (place + token - num_local - 1) * heads + head
    here = place + token
    lse_at = pointers(lse_local, lse_remote, place, num_local, there, all_head * lse_head + here * lse_row)
    delta_at = pointers(delta_local, delta_remote, place, num_local, there, all_head * delta_head + here * delta_row)
    lse = tl.load(lse_at, mask=valid, other=float("inf")) * LOG2E
    delta = tl.load(delta_at, mask=valid, other=0.0)
    all_kv = group * kv_heads + kv_head
    at = pointers(dq_local, dq_remote, place, num_local, there * D, all_head * dq_head + here * dq_row)
    dq1 = load_sums(at, valid, 1 / scale, 0, D1)
    dq2 = load_sums(at, valid, 1 / scale, D1, D2) if D2 > 0 else tl.zeros((BM, 16), tl.float32)
    begin, masked, end = tl.load(block + 3), tl.load(block + 4), tl.load(block + 5)
    for e in range(begin, masked):
        dq1, dq2 = dq_tile(
            entries + e * 3, dq1, dq2, q1, q2, g1, g2, lse, delta, k_local, k_remote, k_table, v_local, v_remote,
            v_table, ranges, token, valid, num_local, k_row, v_row, all_kv * k_head, all_kv * v_head, kv_head * D,
            scale, softcap, T, BM, BN, D1, D2, UNIT, CAPPED, EXACT, False,
        )  # fmt: skip
    for e in range(masked, end):
        dq1, dq2 = dq_tile(
            entries + e * 3, dq1, dq2, q1, q2, g1, g2, lse, delta, k_local, k_remote, k_table, v_local, v_remote,
            v_table, ranges, token, valid, num_local, k_row, v_row, all_kv * k_head, all_kv * v_head, kv_head * D,
            scale, softcap, T, BM, BN, D1, D2, UNIT, CAPPED, EXACT, True,
        )  # fmt: skip
    store_sums(at, dq1 * scale, valid, 0, D1)
    if D2 > 0:
        store_sums(at, dq2 * scale, valid, D1, D2)
