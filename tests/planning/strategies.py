"""Hypothesis strategies for planner tests: batches, masks and topologies of any kind, small enough for brute force."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from hf_dcp import masks
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology


@st.composite
def random_ranges(draw: st.DrawFn, length: int) -> masks.Mask:
    """Explicit ranges: any, also overlapping, empty and bidirectional."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ranges = np.sort(rng.integers(0, length + 1, (length, draw(st.integers(1, 3)), 2)), axis=2).astype(np.int32)
    ranges[rng.random(ranges.shape[:2]) < 0.3] = 0
    return masks.from_ranges(ranges)


@st.composite
def split(draw: st.DrawFn, length: int, parts: int) -> list[int]:
    """``parts`` lengths, some maybe 0, that add up to ``length``."""
    cuts = sorted(draw(st.lists(st.integers(0, length), min_size=parts - 1, max_size=parts - 1)))
    return np.diff([0, *cuts, length]).tolist()


@st.composite
def any_mask(draw: st.DrawFn, length: int) -> masks.Mask:
    size = st.integers(1, max(1, length))
    kind = draw(st.sampled_from(["causal", "full", "window", "lambda", "blockwise", "shared", "documents", "ranges"]))
    if kind == "window":
        return masks.sliding_window(draw(size))
    if kind == "lambda":
        return masks.lambda_mask(draw(st.integers(0, 4)), draw(size))
    if kind == "blockwise":
        count = st.integers(0, 2)
        return masks.causal_blockwise(draw(size), draw(st.integers(1, 3)), draw(count), draw(count))
    if kind == "shared":
        question, *answers = draw(split(length, draw(st.integers(2, 4))))
        return masks.shared_question(question, answers)
    if kind == "documents":
        lengths = [n for n in draw(split(length, draw(st.integers(1, 4)))) if n]
        return masks.documents(lengths, draw(st.sampled_from([masks.causal(), masks.full()])))
    if kind == "ranges":
        return draw(random_ranges(length))
    return masks.causal() if kind == "causal" else masks.full()


@st.composite
def batches(draw: st.DrawFn, max_length: int = 40, max_sequences: int = 4) -> BatchSpec:
    lengths = draw(st.lists(st.integers(1, max_length), min_size=1, max_size=max_sequences))
    return BatchSpec(lengths, [draw(any_mask(length)) for length in lengths])


topologies = st.sampled_from(
    [
        Topology((0,)),
        Topology.grid(1, 2),
        Topology.grid(2, 1),
        Topology((0, 0, 1)),
        Topology((0, 1, 0, 1, 0)),
        Topology.grid(3, 2),
        Topology((0, 0, 0, 0, 1, 1, 2, 0)),
        Topology.grid(3, 4),
    ]
)

shapes = st.sampled_from(
    [
        ModelShape(4, 2, 3, "fp32"),
        ModelShape(2, 2, 2, "bf16"),
        ModelShape(6, 1, 2, "fp32"),
        ModelShape(4, 2, 2, "fp32", windows=((None, 2), (5, 3))),
    ]
)


def dense_mask(batch: BatchSpec, window: int | None = None) -> np.ndarray:
    """bool[tokens, tokens] straight from the masks' ranges: the independent reference of all planner tests."""
    mask = np.zeros((batch.num_tokens, batch.num_tokens), bool)
    for start, length, spec in zip(batch.starts, batch.lengths, batch.masks, strict=False):
        for i, row in enumerate(spec.ranges(length)):
            for lo, hi in row:
                lo = lo if window is None else max(lo, i - window + 1)
                mask[start + i, start + lo : start + max(lo, hi)] = True
    return mask
