"""The gradients of K and V over tile lists."""

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
def dkv_tile(
    entry, pack, dk1, dk2, dv1, dv2, k1, k2, v1, v2, q_local, q_remote, q_table, g_local, g_remote, g_table,
    lse_local, lse_remote, delta_local, delta_remote, ranges, num_local, kv_heads, h, group, kv_head,
    q_head, q_row, g_head, g_row, lse_head, lse_row, delta_head, delta_row, scale, softcap,
    PACK: tl.constexpr, T: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, UNIT: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """dK (without the factor ``scale``) and dV after one more tile of ``PACK`` query heads."""
    D: tl.constexpr = D1 + D2
    PARTIAL: tl.constexpr = MASKED or T * PACK != BM
    heads = kv_heads * h
    place = tl.load(entry)
    row = tl.arange(0, BM)
    token, head = row // PACK, kv_head * h + pack * PACK + row % PACK
    valid = token < tl.load(entry + 1) if MASKED else token < T
    all_head = group * heads + head
    q_at = offsets_of(q_table, place + token, valid, num_local, q_row, all_head * q_head, head * D, UNIT)
    g_at = offsets_of(g_table, place + token, valid, num_local, g_row, all_head * g_head, head * D, UNIT)
    q_base = base_of(q_local, q_remote, place, num_local)
    g_base = base_of(g_local, g_remote, place, num_local)
    there = (place + token - num_local - 1) * heads + head
    here = place + token
    lse_at = pointers(lse_local, lse_remote, place, num_local, there, all_head * lse_head + here * lse_row)
    delta_at = pointers(delta_local, delta_remote, place, num_local, there, all_head * delta_head + here * delta_row)
    lse = tl.load(lse_at, mask=valid, other=float("inf")) * LOG2E
    delta = tl.load(delta_at, mask=valid, other=0.0)
    q1 = load_rows(q_base, q_at, valid, 0, D1, PARTIAL)
    g1 = load_rows(g_base, g_at, valid, 0, D1, PARTIAL)
    s = dot(k1, tl.trans(q1), EXACT)
    dp = dot(v1, tl.trans(g1), EXACT)
    q2, g2 = q1, g1
    if D2 > 0:
        q2 = load_rows(q_base, q_at, valid, D1, D2, PARTIAL)
        g2 = load_rows(g_base, g_at, valid, D1, D2, PARTIAL)
        s += dot(k2, tl.trans(q2), EXACT)
        dp += dot(v2, tl.trans(g2), EXACT)
    s *= scale
    tanh = s
    if CAPPED:
        s, tanh = capped(s, softcap)
    p = tl.exp2(s * LOG2E - lse[None, :])
    if MASKED:
        first, end = bounds_of(ranges, entry, token, valid, T)
        column = tl.arange(0, BN)[:, None]
        p = tl.where((column >= first[None, :]) & (column < end[None, :]), p, 0.0)
    ds = p * (dp - delta[None, :])
    if CAPPED:
        ds *= 1 - tanh * tanh
    p, ds = p.to(q1.dtype), ds.to(q1.dtype)
    dv1 += dot(p, g1, EXACT)
    dk1 += dot(ds, q1, EXACT)
    if D2 > 0:
        dv2 += dot(p, g2, EXACT)
        dk2 += dot(ds, q2, EXACT)
    return dk1, dk2, dv1, dv2


@triton.jit(do_not_specialize=["num_local"])
def dkv(
    q_local, q_remote, q_table, g_local, g_remote, g_table, k_local, k_remote, k_table, v_local, v_remote, v_table,
    lse_local, lse_remote, delta_local, delta_remote, dk_local, dk_remote, dv_local, dv_remote,
    blocks, entries, ranges, num_local, kv_heads, h,
    q_head, q_row, g_head, g_row, k_head, k_row, v_head, v_row, lse_head, lse_row, delta_head, delta_row,
    dk_head, dk_row, dv_head, dv_row, scale, softcap,
    PACK: tl.constexpr, T: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, UNIT: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Gradients of a KV block's rows over its tiles and all query heads, added to dK and dV.

    Grid: (KV blocks, KV heads of a group).
    """
    D: tl.constexpr = D1 + D2
    packs = h // PACK
    block = blocks + tl.program_id(0) * 6
    kv_head = tl.program_id(1)
    place, count, group = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    column = tl.arange(0, BN)
    inside = column < count
    all_kv = group * kv_heads + kv_head
    k_at = offsets_of(k_table, place + column, inside, num_local, k_row, all_kv * k_head, kv_head * D, UNIT)
    v_at = offsets_of(v_table, place + column, inside, num_local, v_row, all_kv * v_head, kv_head * D, UNIT)
    k_base = base_of(k_local, k_remote, place, num_local)
    v_base = base_of(v_local, v_remote, place, num_local)
    k1, v1 = load_rows(k_base, k_at, inside, 0, D1, True), load_rows(v_base, v_at, inside, 0, D1, True)
    k2 = load_rows(k_base, k_at, inside, D1, D2, True) if D2 > 0 else k1
    v2 = load_rows(v_base, v_at, inside, D1, D2, True) if D2 > 0 else v1
    there = ((place + column - num_local - 1) * kv_heads + kv_head) * D
    here = place + column
    dk_at = pointers(dk_local, dk_remote, place, num_local, there, all_kv * dk_head + here * dk_row)
    dv_at = pointers(dv_local, dv_remote, place, num_local, there, all_kv * dv_head + here * dv_row)
    dk1, dv1 = load_sums(dk_at, inside, 1 / scale, 0, D1), load_sums(dv_at, inside, 1.0, 0, D1)
    dk2 = load_sums(dk_at, inside, 1 / scale, D1, D2) if D2 > 0 else tl.zeros((BN, 16), tl.float32)
    dv2 = load_sums(dv_at, inside, 1.0, D1, D2) if D2 > 0 else tl.zeros((BN, 16), tl.float32)
    begin, masked, end = tl.load(block + 3), tl.load(block + 4), tl.load(block + 5)
    for i in range(begin * packs, masked * packs):
        dk1, dk2, dv1, dv2 = dkv_tile(
            entries + i // packs * 3, i % packs, dk1, dk2, dv1, dv2, k1, k2, v1, v2, q_local, q_remote, q_table,
            g_local, g_remote, g_table, lse_local, lse_remote, delta_local, delta_remote, ranges, num_local,
            kv_heads, h, group, kv_head, q_head, q_row, g_head, g_row, lse_head, lse_row, delta_head, delta_row, scale, softcap,
            PACK, T, BM, BN, D1, D2, UNIT, CAPPED, EXACT, False,
        )  # fmt: skip
    for i in range(masked * packs, end * packs):
        dk1, dk2, dv1, dv2 = dkv_tile(
            entries + i // packs * 3, i % packs, dk1, dk2, dv1, dv2, k1, k2, v1, v2, q_local, q_remote, q_table,
            g_local, g_remote, g_table, lse_local, lse_remote, delta_local, delta_remote, ranges, num_local,
            kv_heads, h, group, kv_head, q_head, q_row, g_head, g_row, lse_head, lse_row, delta_head, delta_row, scale, softcap,
            PACK, T, BM, BN, D1, D2, UNIT, CAPPED, EXACT, True,
        )  # fmt: skip
    store_sums(dk_at, dk1 * scale, inside, 0, D1)
    store_sums(dv_at, dv1, inside, 0, D1)
    if D2 > 0:
        store_sums(dk_at, dk2 * scale, inside, D1, D2)
        store_sums(dv_at, dv2, inside, D1, D2)
