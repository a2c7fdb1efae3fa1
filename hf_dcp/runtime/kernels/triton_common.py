"""What the Triton kernels have in common, and how they see memory.

One program computes one block of a tile list for one KV head. A Q block holds the rows of ``PACK`` query heads of the
same KV head together, so that K and V are loaded once for all of them: row m is token m // PACK, head m % PACK.

Rows of inputs are either local (strides of their own) or were received; then a table says where a row lies in the
buffer that it was received into, in units of ``UNIT`` elements (16 bytes). Accumulators are fp32 in two parts, local and
remote. A head dimension is the sum of two powers of 2, D1 + D2 (D2 may be 0). ``EXACT`` makes products in fp32, for
fp32 inputs, and for Triton's interpreter, which multiplies bf16 wrongly.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def offsets_of(table, places, inside, num_local, local_row, local_shift, remote_shift, UNIT: tl.constexpr):
    """Element offset of each place's row: int32[N]; all places are local, or all are remote."""
    remote = places > num_local
    received = tl.load(table + (places - num_local - 1), mask=remote & inside, other=0)
    offsets = tl.where(remote, received * UNIT + remote_shift, places * local_row + local_shift)
    return tl.multiple_of(offsets, UNIT)


@triton.jit
def load_rows(base, offsets, inside, FIRST: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr):
    """Columns [FIRST, FIRST + D) of rows: [N, D]."""
    at = base + offsets[:, None] + (FIRST + tl.arange(0, D))[None, :]
    return tl.load(at, mask=inside[:, None], other=0.0) if MASKED else tl.load(at)


@triton.jit
def dot(a, b, EXACT: tl.constexpr):
    if EXACT:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def base_of(local, remote, place, num_local):
    return tl.where(place > num_local, remote, local)


@triton.jit
def capped(scores, softcap):
    """softcap * tanh(score / softcap), and the tanh."""
    tanh = 1 - 2 / (1 + tl.exp2(scores * (2 * LOG2E / softcap)))
    return softcap * tanh, tanh


@triton.jit
def bounds_of(ranges, entry, token, valid, T: tl.constexpr):
    """First column, and end, of what each row attends to in a masked tile."""
    at = ranges + (tl.load(entry + 2) * T + token) * 2
    return tl.load(at, mask=valid, other=0), tl.load(at + 1, mask=valid, other=0)


@triton.jit
def pointers(local, remote, place, num_local, there, here):
    """Addresses of rows of an accumulator: remote offsets ``there``, local ones ``here``."""
    away = place > num_local
    return tl.where(away, remote, local) + tl.where(away, there, here)


@triton.jit
def load_sums(at, inside, factor, FIRST: tl.constexpr, D: tl.constexpr):
    """Columns [FIRST, FIRST + D) of accumulator rows times ``factor``: what earlier divisions have left, to go on from."""
    return tl.load(at[:, None] + (FIRST + tl.arange(0, D))[None, :], mask=inside[:, None], other=0.0) * factor


@triton.jit
def store_sums(at, sums, inside, FIRST: tl.constexpr, D: tl.constexpr):
    tl.store(at[:, None] + (FIRST + tl.arange(0, D))[None, :], sums, mask=inside[:, None])
