"""Outcomes of many batches, summed up, and what follows from them in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_dcp.estimate.schemes import DCP, Outcome
from hf_dcp.planning.static import SCHEMES

HELPS = 1.05
"""Below this speed-up of a step, DCP is not worth a change."""
EVEN = 1.25
"""Up to this ratio of the 90th to the 10th percentile, lengths are about equal."""
HIDDEN = 0.05
"""Up to this share of attention, exposed exchange doesn't matter."""
SMALL = 0.10
"""Up to this share of a step, attention doesn't matter."""


@dataclass(frozen=True)
class SchemeSummary:
    """One scheme over all batches: means per step, of all layers, forward and backward."""

    attention_s: float
    exposed_s: float
    step_s: float
    inter_bytes: float
    intra_bytes: float
    device_bytes: float
    imbalance: float
    memory: float
    """The most of any batch."""
    speedup: float
    """Of DCP over this scheme, whole steps, over all batches together."""
    spread: tuple[float, float]
    """10th and 90th percentile of the batches' own speed-ups."""
    attention_speedup: float


def summarise(outcomes: Sequence[dict[str, Outcome]]) -> dict[str, SchemeSummary]:
    """Scheme -> summary, over the batches that all have been put through the same schemes."""
    dcp = [one[DCP] for one in outcomes]
    return {name: _summary([one[name] for one in outcomes], dcp) for name in outcomes[0]}


def _summary(own: list[Outcome], dcp: list[Outcome]) -> SchemeSummary:
    def mean(field: str) -> float:
        return float(np.mean([getattr(one, field) for one in own]))

    ratios = [_ratio(a.step_s, b.step_s) for a, b in zip(own, dcp, strict=True)]
    low, high = np.percentile(ratios, [10, 90])
    return SchemeSummary(
        **{field: mean(field) for field in ("attention_s", "exposed_s", "step_s", "inter_bytes", "intra_bytes")},
        **{field: mean(field) for field in ("device_bytes", "imbalance")},
        memory=float(max(one.memory for one in own)),
        speedup=_ratio(sum(one.step_s for one in own), sum(one.step_s for one in dcp)),
        spread=(float(low), float(high)),
        attention_speedup=_ratio(sum(one.attention_s for one in own), sum(one.attention_s for one in dcp)),
    )


def _ratio(a: float, b: float) -> float:
    return a / b if b else 1.0


def best_static(schemes: dict[str, SchemeSummary]) -> str:
    """The static scheme, as published, with the shortest step."""
    return min((name for name in SCHEMES if name in schemes), key=lambda name: schemes[name].step_s)


def verdict(schemes: dict[str, SchemeSummary], lengths: np.ndarray, devices: int) -> str:
    """One plain sentence.

    Args:
        lengths: int64[rows], tokens of the rows.
    """
    if devices == 1:
        return "DCP would not help here: on one device nothing has to travel."
    name = best_static(schemes)
    best, dcp = schemes[name], schemes[DCP]
    if best.speedup < HELPS:
        return f"DCP would not help here: {' and '.join(reasons(best, lengths, name))}."
    low, high = best.spread
    spread = f" ({low:.2f}x to {high:.2f}x from batch to batch)" if high - low >= 0.02 else ""
    return (
        f"DCP would make a step {best.speedup:.2f}x as fast as the best static scheme, {name}{spread}: attention is "
        f"{best.attention_speedup:.2f}x as fast, and {_less(best, dcp)}."
    )


def _less(best: SchemeSummary, dcp: SchemeSummary) -> str:
    where = "between nodes" if best.inter_bytes else "between devices"
    before = best.inter_bytes or best.intra_bytes
    after = dcp.inter_bytes if best.inter_bytes else dcp.intra_bytes
    if not before:
        return "as much travels"
    saved = 1 - after / before
    return f"{abs(saved):.0%} {'fewer' if saved >= 0 else 'more'} bytes travel {where}"


def reasons(best: SchemeSummary, lengths: np.ndarray, name: str) -> list[str]:
    """Why a static scheme is about as good, in words that stand behind a colon."""
    found = []
    low, high = np.percentile(lengths, [10, 90])
    if high <= EVEN * low:
        found.append("all sequences are about equally long")
    if best.attention_s < SMALL * best.step_s:
        found.append(f"attention is only {best.attention_s / best.step_s:.0%} of a step")
    elif best.exposed_s <= HIDDEN * best.attention_s:
        found.append(f"the link is fast enough to hide the exchanges of {name} behind its compute")
    if not found:
        found.append(f"a step would be {best.speedup:.2f}x as fast as with {name}, too little for a change")
    return found


def notes(lengths: np.ndarray, tokens_per_batch: int, devices: int) -> list[str]:
    """What a reader should know besides."""
    found = []
    if devices > 1 and int(lengths.max()) * devices <= tokens_per_batch:
        found.append(
            f"The longest row fits the share of one device ({tokens_per_batch // devices:,} tokens): plain data "
            "parallelism, with batches of equal work, needs no exchange in attention either."
        )
    return found


@dataclass(frozen=True)
class Bin:
    """Rows with at least ``low`` and fewer than ``high`` tokens."""

    low: int
    high: int
    rows: int
    tokens: int


def histogram(lengths: np.ndarray) -> list[Bin]:
    """Rows by length in powers of two, from the first that has some to the last."""
    power = np.floor(np.log2(lengths)).astype(int)
    tokens = np.bincount(power, weights=lengths)
    rows = np.bincount(power)
    return [Bin(2**p, 2 ** (p + 1), int(rows[p]), int(tokens[p])) for p in range(power.min(), power.max() + 1)]
