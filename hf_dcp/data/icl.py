"""Many-shot in-context learning: rows of examples and a test example, and blockwise masks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from hf_dcp.data.rows import IGNORE, Row
from hf_dcp.masks import Mask, causal_blockwise, from_ranges

Example = tuple[Sequence[int], Sequence[int]]
"""Token ids of what is given, and of the answer to it."""


def icl_row(
    examples: Sequence[Example],
    test: Example,
    labels: Literal["all", "test"] = "all",
    max_length: int | None = None,
    number: int = 0,
) -> Row:
    """One row: examples, and behind them the test example.

    Args:
        labels: train on all answers, or on that of the test example only.
        max_length: the first examples are left out, as many as must be, so that the row has no more tokens.
        number: of the row, for errors.

    Returns:
        ``input_ids``, ``labels``, ``length``, and ``example_lengths``: the tokens of every example, the test example last.

    Raises:
        ValueError: for a test example without an answer or longer than ``max_length``, or an example without a token;
            the text names the row.
    """
    if not test[1]:
        raise ValueError(f"row {number} has a test example without an answer: give its token ids")
    shots = [*examples, test]
    lengths = [len(given) + len(answer) for given, answer in shots]
    for i, length in enumerate(lengths):
        if length == 0:
            raise ValueError(f"row {number} has no token in example {i}: leave empty examples out")
    if max_length is not None:
        if lengths[-1] > max_length:
            raise ValueError(
                f"row {number} has a test example of {lengths[-1]} tokens, more than max_length={max_length}: leave it out "
                "or raise max_length"
            )
        fits = int((np.cumsum(lengths[::-1]) <= max_length).sum())
        shots, lengths = shots[-fits:], lengths[-fits:]
    ids: list[int] = []
    targets: list[int] = []
    for i, (given, answer) in enumerate(shots):
        counts = labels == "all" or i == len(shots) - 1
        ids += [*given, *answer]
        targets += [IGNORE] * len(given) + (list(answer) if counts else [IGNORE] * len(answer))
    return {"input_ids": ids, "labels": targets, "length": len(ids), "example_lengths": lengths}


def blocks_of_tokens(row: Row, block: int, window_blocks: int, sink_blocks: int) -> Mask:
    """`hf_dcp.causal_blockwise` for a row of `icl_row`, with blocks of ``block`` tokens wherever examples begin.

    All blocks with a token of the test example are test blocks.

    Raises:
        ValueError: as `hf_dcp.causal_blockwise`.
    """
    length = len(row["input_ids"])
    first_of_test = length - row["example_lengths"][-1]
    mask = causal_blockwise(block, window_blocks, sink_blocks, 0)
    test_blocks = -(-length // block) - first_of_test // block
    return causal_blockwise(block, window_blocks, sink_blocks, test_blocks) if test_blocks else mask


def blocks_of_examples(row: Row, window_blocks: int, sink_blocks: int, examples_per_block: int = 1) -> Mask:
    """The same with blocks that begin where examples do: so many examples make a block, and the test example is one.

    Raises:
        ValueError: for window_blocks or examples_per_block below 1, or negative sink_blocks.
    """
    for name, value, least in (
        ("window_blocks", window_blocks, 1),
        ("sink_blocks", sink_blocks, 0),
        ("examples_per_block", examples_per_block, 1),
    ):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
    lengths = np.asarray(row["example_lengths"], np.int64)
    groups = np.arange(0, len(lengths) - 1, examples_per_block)
    shots = np.add.reduceat(lengths[:-1], groups) if len(groups) else lengths[:0]
    blocks = np.append(shots, lengths[-1]).astype(np.int64)
    starts = np.cumsum(blocks) - blocks
    ends = np.append(starts[1:], blocks.sum())
    block = np.repeat(np.arange(len(blocks)), blocks)
    i = np.arange(len(block))
    test = block == len(blocks) - 1
    sink = ends[sink_blocks - 1] if 0 < sink_blocks <= len(ends) else (ends[-1] if sink_blocks else 0)
    first = starts[np.maximum(block - window_blocks + 1, 0)]
    ranges = np.empty((len(block), 2, 2), np.int32)
    ranges[:, 0, 0], ranges[:, 0, 1] = 0, np.where(test, i + 1, np.minimum(sink, i + 1))
    ranges[:, 1, 0], ranges[:, 1, 1] = first, i + 1
    return from_ranges(ranges)
