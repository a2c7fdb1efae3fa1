"""Models of TRL's trainers: hooks that swap TRL's padded pairs for packed tokens, and give values back in its shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dcp.integrations.preferences import LocalTokens, PreferencePlan, gather
from hf_dcp.lookahead.batch_plan import BatchPlan

PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")
"""What TRL's output of a language model holds for each token; gradients flow through the first."""
REPLACED = ("input_ids", "attention_mask", "position_ids", "labels", "shift_labels")


def watch_log_probs(model: PreTrainedModel) -> None:
    """Let a causal language model with TRL's fused head take batches of pairs, and evaluate over the whole group."""
    model.register_forward_pre_hook(_swap_inputs, with_kwargs=True, prepend=True)
    model.register_forward_hook(_restore_log_probs, with_kwargs=True, prepend=True)


def watch_scores(model: PreTrainedModel) -> None:
    """Let a model of rewards take batches of pairs.

    Raises:
        ValueError: if its head is not called ``score``.
    """
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Module):
        raise ValueError(
            f"{type(model).__name__} has no head named score, so rewards can't be read off its tokens: use a "
            "...ForSequenceClassification such as LlamaForSequenceClassification"
        )
    scores: list[Tensor] = []  # of all local tokens, from the head to the end of the same forward

    def keep(module: nn.Module, args: tuple, output: Tensor) -> None:
        scores[:] = [output]

    def restore(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        plan = kwargs.get("dcp_plan")
        if isinstance(plan, PreferencePlan):
            output.logits = _restore(scores.pop()[0], plan.local, plan).reshape(len(plan.local.table), -1)
        return output

    head.register_forward_hook(keep)
    model.register_forward_pre_hook(_swap_inputs, with_kwargs=True, prepend=True)
    model.register_forward_hook(restore, with_kwargs=True, prepend=True)


def _swap_inputs(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    plan = kwargs.get("dcp_plan")
    if not isinstance(plan, PreferencePlan):
        return None
    kept = {name: value for name, value in kwargs.items() if name not in REPLACED}
    local = {"input_ids": plan.local.input_ids, "position_ids": plan.local.position_ids}
    if "labels" in kwargs:
        local["shift_labels"] = plan.local.shift_labels
    return (), kept | local


def _restore_log_probs(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    plan = kwargs.get("dcp_plan")
    if getattr(output, "log_probs", None) is None or not isinstance(plan, BatchPlan):
        return output
    if isinstance(plan, PreferencePlan):
        _restore_fields(output, plan.local, plan)
        output.loss = None  # TRL makes it of the log-probabilities
    elif not module.training:
        # TRL's loss of an evaluation is a mean over the tokens that it sees: let it see those of the whole group.
        _restore_fields(output, _all_tokens(plan, output.log_probs.device), plan)
    return output


def _restore_fields(output: Any, local: LocalTokens, plan: BatchPlan) -> None:
    names = [name for name in PER_TOKEN if getattr(output, name, None) is not None]
    columns = [getattr(output, name)[0] for name in names]
    dtype = torch.promote_types(columns[0].dtype, torch.float32)
    columns = [columns[0].to(dtype), *(column.detach().to(dtype) for column in columns[1:])]
    values = _restore(torch.stack(columns, 1), local, plan)
    for i, name in enumerate(names):
        stock = getattr(output, name).dtype
        setattr(output, name, values[..., i] > 0.5 if stock == torch.bool else values[..., i].to(stock))


def _restore(values: Tensor, local: LocalTokens, plan: BatchPlan) -> Tensor:
    """Values of this rank's tokens, [S, F], as TRL wants them, of the whole group: [rows, columns, F]."""
    return gather(values[local.rows], local.slots, local.size, plan)[local.table]


def _all_tokens(plan: BatchPlan, device: torch.device) -> LocalTokens:
    """All tokens of the group, in their order, as one row."""
    tokens = torch.from_numpy(plan.rank_plan.local_tokens()).to(device)
    size = plan.rank_plan.num_tokens
    none = torch.zeros(1, 0, dtype=torch.int64)
    rows = torch.arange(len(tokens), device=device)
    return LocalTokens(none, none, none, rows, tokens, size, torch.arange(size, device=device)[None])
