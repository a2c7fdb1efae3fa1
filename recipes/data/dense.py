"""Whole batches for one process with dense masks: what a DCP run is compared with. Not for training."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hf_dcp.masks import Mask, parse_mask

MOST_TOKENS = 32768


class DenseCollator:
    """All rows of a batch behind each other in one row, with a dense mask, for ``attn_implementation="sdpa"``.

    It shares nothing with the DCP collator but the meaning of a mask: labels are left to the model to shift.

    Args:
        mask: a mask as text, such as ``"causal"`` or ``"shared:0.2x4"``.
    """

    def __init__(self, mask: str) -> None:
        self.mask = parse_mask(mask)

    def __call__(self, items: list[list[dict[str, Any]]]) -> dict[str, torch.Tensor]:
        """One item, a list of rows with ``input_ids`` -> tensors [1, tokens], and a mask bool[1, 1, tokens, tokens]."""
        (rows,) = items
        lengths = [len(row["input_ids"]) for row in rows]
        if sum(lengths) > MOST_TOKENS:
            raise ValueError(f"dense masks are for at most {MOST_TOKENS} tokens a batch: lower tokens_per_batch")
        labels = [first_unpredicted(row.get("labels", row["input_ids"]), self.mask) for row in rows]
        return {
            "input_ids": torch.from_numpy(np.concatenate([np.array(row["input_ids"], np.int64) for row in rows]))[None],
            "labels": torch.from_numpy(np.concatenate(labels))[None],
            "position_ids": torch.from_numpy(np.concatenate([self.mask.positions(n) for n in lengths]))[None],
            "attention_mask": torch.block_diag(*(dense_mask(self.mask, n) for n in lengths)).bool()[None, None],
        }


def first_unpredicted(labels: list[int], mask: Mask) -> np.ndarray:
    """int64[L] labels where tokens that their predecessor must not predict carry -100."""
    result = np.array(labels, np.int64)
    result[0] = -100
    result[mask.segment_starts(len(result))] = -100
    return result


def dense_mask(mask: Mask, length: int) -> torch.Tensor:
    """bool[L, L]: query token i attends to key token j."""
    key = np.arange(length)
    seen = np.zeros((length, length), bool)
    for lo, hi in mask.ranges(length).transpose(1, 2, 0):
        seen |= (lo[:, None] <= key) & (key < hi[:, None])
    return torch.from_numpy(seen)
