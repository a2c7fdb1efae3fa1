"""Whether the items of all ranks compute every attended pair exactly once, and nothing else.

Counting pairs one by one is far too slow for long sequences. Every token has a random 64-bit number instead, and a set
of KV tokens has the sum of their numbers modulo 2**64 as its **fingerprint**. That of a range is a difference of two
prefix sums, so that a query row of an item costs one subtraction. If a pair is missing, double or too much, the sums of
its row differ from those of the mask, except by a chance of about 1 in 2**64. The numbers are the same in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numba as nb
import numpy as np

from hf_dcp.masks import intersect_window, normalise
from hf_dcp.planning.batch import BatchSpec
from hf_dcp.planning.check.error import PlanError
from hf_dcp.planning.check.rows import Slots
from hf_dcp.planning.plan import Item, Slice, WindowPlan


@dataclass(frozen=True)
class Fingerprints:
    """Prefix sums of the tokens' numbers, as query tokens and as KV tokens: uint64[tokens + 1] each."""

    q: np.ndarray
    kv: np.ndarray

    @classmethod
    def of(cls, num_tokens: int) -> Fingerprints:
        numbers = np.random.default_rng(0).integers(0, 2**64, (2, num_tokens), np.uint64)
        prefix = np.zeros((2, num_tokens + 1), np.uint64)
        np.cumsum(numbers, axis=1, out=prefix[:, 1:])
        return cls(*prefix)


@dataclass(frozen=True)
class Expected:
    """What the mask says, for one window."""

    ranges: tuple[np.ndarray, ...]
    """int32[length, R, 2] of each sequence, normalised, in its own coordinates."""
    q: np.ndarray
    """uint64[tokens]: fingerprint of the KV tokens that each query token attends to."""
    kv: np.ndarray
    """uint64[tokens]: fingerprint of the query tokens that attend to each KV token."""

    @classmethod
    def of(cls, batch: BatchSpec, window: int | None, prints: Fingerprints) -> Expected:
        known: dict[tuple[int, str], np.ndarray] = {}
        ranges = []
        q, kv = (np.zeros(batch.num_tokens + 1, np.uint64) for _ in range(2))
        number = np.diff(prints.q)
        for start, length, mask in zip(batch.starts.tolist(), batch.lengths, batch.masks):
            key = (length, mask.key(length))
            if key not in known:
                normal = normalise(mask.ranges(length))
                known[key] = normal if window is None else intersect_window(normal, window)
            ranges.append(known[key])
            lo, hi = (known[key][:, :, c].astype(np.int64) + start for c in (0, 1))
            q[start : start + length] = (prints.kv[hi] - prints.kv[lo]).sum(1, dtype=np.uint64)
            each = np.repeat(number[start : start + length, None], lo.shape[1], 1)
            np.add.at(kv, lo, each)
            np.subtract.at(kv, hi, each)
        return cls(tuple(ranges), q[:-1], np.cumsum(kv, dtype=np.uint64)[:-1])


def attend(
    items: np.ndarray, slices: np.ndarray, sides: tuple[Slots, Slots], prints: Fingerprints, sums: Sequence[np.ndarray]
) -> None:
    """Add the fingerprints of these items to the sums of their rows: uint64[slots] of Q and of KV rows."""
    steps = np.stack([sides[0].step(items[:, Item.Q_SLOT]), sides[1].step(items[:, Item.KV_SLOT])], 1)
    _attend(*(a.astype(np.int64) for a in (items, slices, steps)), prints.q, prints.kv, *sums)


@nb.njit(cache=True)
def _attend(items, slices, steps, q_prefix, kv_prefix, q_sums, kv_sums):
    changes = np.zeros(1 if len(items) == 0 else items[:, 3].max() + 1, np.uint64)
    for i in range(len(items)):
        q_slot, q_count, kv_slot, kv_count = items[i, 0], items[i, 1], items[i, 2], items[i, 3]
        q_token, kv_token, begin, end = items[i, 4], items[i, 5], items[i, 6], items[i, 7]
        q_step, kv_step = steps[i, 0], steps[i, 1]
        if begin == end:
            row = kv_prefix[kv_token + kv_count] - kv_prefix[kv_token]
            column = q_prefix[q_token + q_count] - q_prefix[q_token]
            for r in range(q_count):
                q_sums[q_slot + r * q_step] += row
            for c in range(kv_count):
                kv_sums[kv_slot + c * kv_step] += column
            continue
        changes[: kv_count + 1] = 0
        for s in range(begin, end):
            first = slices[s, 0]
            for q in range(max(first, q_token), min(slices[s, 1], q_token + q_count)):
                lo = max(slices[s, 2] + (q - first) * slices[s, 4], kv_token)
                hi = min(slices[s, 3] + (q - first) * slices[s, 5], kv_token + kv_count)
                if lo < hi:
                    q_sums[q_slot + (q - q_token) * q_step] += kv_prefix[hi] - kv_prefix[lo]
                    number = q_prefix[q + 1] - q_prefix[q]
                    changes[lo - kv_token] += number
                    changes[hi - kv_token] -= number
        total = np.uint64(0)
        for c in range(kv_count):
            total += changes[c]
            kv_sums[kv_slot + c * kv_step] += total


def require_coverage(
    batch: BatchSpec,
    parts: Sequence[WindowPlan],
    sides: Sequence[tuple[Slots, Slots]],
    sums: Sequence[Sequence[np.ndarray]],
    expected: Expected,
    where: str,
) -> None:
    """Require the items of all ranks together to be the mask.

    Args:
        sums: by rank, the sums of `attend` over all its items.
    """
    groups = sides[0][0].groups
    total = np.zeros((batch.num_tokens, groups), np.uint64)
    for (slots, _), (own, _) in zip(sides, sums):
        np.add.at(total, (slots.token, slots.group), own)
    wrong = np.argwhere(total != expected.q[:, None])
    if len(wrong):
        token, group = wrong[0].tolist()
        raise PlanError(f"{where}: {_first_wrong_pair(batch, parts, sides, expected, token, group)}")


def _first_wrong_pair(
    batch: BatchSpec,
    parts: Sequence[WindowPlan],
    sides: Sequence[tuple[Slots, Slots]],
    expected: Expected,
    token: int,
    group: int,
) -> str:
    """Which pair of this query row is not computed as often as the mask says: found by counting."""
    sequence = int(np.searchsorted(batch.starts, token, side="right")) - 1
    start = int(batch.starts[sequence])
    times, wanted = np.zeros(batch.num_tokens, np.int64), np.zeros(batch.num_tokens, np.int64)
    for lo, hi in (expected.ranges[sequence][token - start] + start).tolist():
        wanted[lo:hi] += 1
    for part, (slots, _) in zip(parts, sides):
        items = part.items.astype(np.int64)
        first, count = items[:, Item.Q_TOKEN], items[:, Item.Q_COUNT]
        own = (slots.group[items[:, Item.Q_SLOT]] == group) & (first <= token) & (token < first + count)
        for item in items[own].tolist():
            left, right = item[Item.KV_TOKEN], item[Item.KV_TOKEN] + item[Item.KV_COUNT]
            spans = _spans(part.slices[item[Item.SLICE_BEGIN] : item[Item.SLICE_END]].tolist(), token)
            for lo, hi in spans if item[Item.SLICE_BEGIN] < item[Item.SLICE_END] else [(left, right)]:
                times[max(lo, left) : max(min(hi, right), 0)] += 1
    kv = int(np.flatnonzero(times != wanted)[0])
    return (
        f"query token {token} {'attends' if wanted[kv] else 'must not attend'} to KV token {kv} (head group {group}), "
        f"but the items compute this pair {times[kv]} times"
    )


def _spans(slices: list[list[int]], token: int) -> list[tuple[int, int]]:
    rows = [(s, token - s[Slice.Q_BEGIN]) for s in slices if s[Slice.Q_BEGIN] <= token < s[Slice.Q_END]]
    return [(s[Slice.LO] + r * s[Slice.LO_SLOPE], s[Slice.HI] + r * s[Slice.HI_SLOPE]) for s, r in rows]
