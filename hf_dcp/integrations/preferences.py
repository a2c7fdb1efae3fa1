"""Pairs of answers on a DCP group: what a model is given, and what it gives back, in the shapes of TRL's trainers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hf_dcp.data.collator import DcpCollator
from hf_dcp.data.rows import IGNORE, GroupBatch
from hf_dcp.data.sharing import SharedBatch, group_pairs, pack
from hf_dcp.data.travel import TravellingBatch
from hf_dcp.lookahead.batch_plan import BatchPlan
from hf_dcp.lookahead.session import Session
from hf_dcp.runtime import DcpPlan, find_communicator

Wanted = Literal["log_probs", "scores"]


@dataclass(frozen=True)
class LocalTokens:
    """This rank's tokens of a packed batch, and where values of the group's tokens stand in TRL's tensors."""

    input_ids: Tensor
    position_ids: Tensor
    shift_labels: Tensor
    """These three: int64[1, S]."""
    rows: Tensor
    """Local tokens whose values are wanted: int64[K]."""
    slots: Tensor
    """Their places among all wanted values of the group: int64[K]."""
    size: int
    """Wanted values of the group."""
    table: Tensor
    """Which value stands where in TRL's tensor, ``size`` where there is none: int64[2 * pairs, columns]."""

    def to(self, device: torch.device) -> LocalTokens:
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "size"}
        return LocalTokens(size=self.size, **{name: tensor.to(device) for name, tensor in tensors.items()})


class PreferencePlan(BatchPlan):
    """A plan that brings its packed tokens along, beside TRL's padded ones."""

    def __init__(self, local: LocalTokens, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.local = local

    @classmethod
    def of(cls, plan: BatchPlan, local: LocalTokens) -> PreferencePlan:
        return cls(local, **BatchPlan.__getstate__(plan))

    def to(self, device: Any = None, *args: Any, non_blocking: bool = False, **kw: Any) -> PreferencePlan:
        if not isinstance(device, (str, torch.device, int)) or torch.device(device) == self.device:
            return self
        state = self.__getstate__() | {"device": torch.device(device), "local": self.local.to(torch.device(device))}
        return PreferencePlan(**state)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"local": self.local}

    def __setstate__(self, state: dict[str, Any]) -> None:
        PreferencePlan.__init__(self, **state)


class PreferenceCollator(DcpCollator):
    """The collator for stock `trl.DPOTrainer` and `trl.RewardTrainer`: each question is there once.

    What both trainers see are the tensors of TRL's own collator, truncated as it does. The model sees, in their place, this
    rank's tokens of packed sequences: a question, or any other beginning that the answers have in common, and behind it the
    answers, under the mask `hf_dcp.shared_question`. Pairs of one batch that have an answer or the question in common
    are packed together, so that n ranked answers, given as pairs in a row, are there once each.

    Args:
        session: of the plugin.
        pad_token: token id with which TRL's tensors are padded.
        stock: TRL's collator; None: that which the trainer would make, once a `hf_dcp.DcpStatsCallback` prepares it.
        wanted: what is read of the model: log-probabilities of next tokens, or the score of the last token.
    """

    def __init__(self, session: Session, pad_token: int = 0, stock: Any = None, wanted: Wanted = "log_probs") -> None:
        super().__init__(session, dummy_token=pad_token)
        self.stock = stock
        self.wanted: Wanted = wanted

    def __call__(self, features: Any) -> dict[str, Any]:
        """Rows with ``chosen_ids``, ``rejected_ids`` and, for DPO, ``prompt_ids`` -> TRL's tensors, and ``dcp_plan``.

        Raises:
            ValueError: for a row without a token to learn from; the text names the row.
        """
        source = self.session.source()
        padded = self._padded(features)
        shared = self.pack(padded)
        plan = source.get(shared.batch.spec)
        # TRL counts tokens by the mask, over all ranks: one rank of each group speaks for it.
        if plan.rank_plan.rank != 0:
            padded["attention_mask"] = torch.zeros_like(padded["attention_mask"])
        local = self.local(shared, plan, padded["input_ids"].shape)
        return TravellingBatch(padded, dcp_plan=PreferencePlan.of(plan, local))

    def read(self, features: Any) -> GroupBatch:
        """The packed batch of the whole group."""
        return self.pack(self._padded(features)).batch

    def _padded(self, features: Any) -> dict[str, Tensor]:
        if self.stock is None:
            raise ValueError(
                "the collator of preferences doesn't know its trainer: add hf_dcp.DcpStatsCallback() to the callbacks of "
                "the DPOTrainer or RewardTrainer"
            )
        for i, row in enumerate(features):
            _check_row(i, row, self.wanted == "log_probs")
        return dict(self.stock(list(features)))

    def pack(self, padded: Mapping[str, Tensor]) -> SharedBatch:
        """TRL's padded tensors as packed sequences."""
        lengths = padded["attention_mask"].sum(1).tolist()
        sequences = [row[:n].numpy() for row, n in zip(padded["input_ids"], lengths, strict=True)]
        if self.wanted == "scores":
            return pack(sequences, group_pairs(sequences, None), None, self.dummy_token)
        masks = [row[:n].numpy() for row, n in zip(padded["completion_mask"], lengths, strict=True)]
        for k, mask in enumerate(masks):
            if not mask.any():
                raise ValueError(
                    f"row {k % (len(masks) // 2)} of the batch has no token of an answer within max_length: "
                    "its question is too long; leave it out or raise max_length"
                )
        prompts = [int(mask.argmax()) for mask in masks]
        labels = [np.where(mask == 1, ids, IGNORE) for ids, mask in zip(sequences, masks, strict=True)]
        return pack(sequences, group_pairs(sequences, prompts), labels, self.dummy_token)

    def local(self, shared: SharedBatch, plan: BatchPlan, shape: torch.Size) -> LocalTokens:
        """The tokens of the plan's rank.

        Args:
            shape: of TRL's tensor, [2 * pairs, L].
        """
        table = np.full((shape[0], shape[1] - 1) if self.wanted == "log_probs" else (shape[0], 1), -1, np.int64)
        for k, place in enumerate(shared.places):
            if self.wanted == "scores":
                table[k, 0] = place[-1]
            else:
                wanted = shared.predicts[k]
                table[k, : len(place)][wanted] = place[wanted]
        needed = np.unique(table[table >= 0])
        tokens = plan.rank_plan.local_tokens()
        rows = np.flatnonzero(np.isin(tokens, needed))
        local = self.cut(shared.batch, plan)
        return LocalTokens(
            **{name: local[name] for name in ("input_ids", "position_ids", "shift_labels")},
            rows=torch.from_numpy(rows),
            slots=torch.from_numpy(np.searchsorted(needed, tokens[rows])),
            size=len(needed),
            table=torch.from_numpy(np.where(table < 0, len(needed), np.searchsorted(needed, table))),
        )


def _check_row(i: int, row: Mapping[str, Any], with_prompt: bool) -> None:
    for name in ("chosen_ids", "rejected_ids") + (("prompt_ids",) if with_prompt else ()):
        if name not in row:
            raise ValueError(f"row {i} of the batch has no {name}: give the data set to TRL's trainer, which makes it")
    for name in ("chosen_ids", "rejected_ids"):
        if len(row[name]) == 0:
            raise ValueError(f"row {i} of the batch has no token in {name}: leave rows with empty answers out")


def gather(values: Tensor, slots: Tensor, size: int, plan: DcpPlan) -> Tensor:
    """The values of all ranks of a group, on each of them; differentiable in ``values``. Collective over the group.

    All ranks compute the same loss of what comes out, so a rank's gradient of it is the common one; times the size of the
    group, since DDP and FSDP average the gradients of the ranks.

    Args:
        values: of this rank, [K, F].
        slots: their places in the result, int64[K].

    Returns:
        [size + 1, F]; the last row is zero.
    """
    return _Gather.apply(values, slots, size, plan)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, slots: Tensor, size: int, plan: DcpPlan) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.world_size = plan.rank_plan.world_size
        result = values.new_zeros(size + 1, values.shape[1])
        result[slots] = values
        if ctx.world_size > 1:  # every place is that of one rank: nothing is rounded
            communicator = find_communicator(plan.communicator, ctx.world_size)
            dist.all_reduce(result, group=communicator.forward_group)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (slots,) = ctx.saved_tensors
        return gradient[slots] * ctx.world_size, None, None, None
