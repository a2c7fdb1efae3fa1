"""The loss that evens out experts: not linear in the tokens of a rank, so that its counts are those of the group."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from hf_dcp.integrations.probe import model_class
from hf_dcp.runtime import DcpPlan, find_communicator

STOCK = "load_balancing_loss_func"


def router_coefficient(model: PreTrainedModel) -> float:
    """The factor of the router loss that the model adds to its loss, or 0.

    Raises:
        ValueError: for a router loss that is not Mixtral's.
    """
    config = model.config.get_text_config()
    coefficient = getattr(config, "router_aux_loss_coef", 0) or 0
    if not getattr(config, "output_router_logits", False) or not coefficient:
        return 0.0
    if not hasattr(sys.modules[model_class(model).__module__], STOCK) or not hasattr(config, "num_experts_per_tok"):
        raise ValueError(
            f"{type(model).__name__} adds a router loss that is not Mixtral's, which DCP does not know: set "
            "output_router_logits=False"
        )
    return float(coefficient)


class RouterLoss:
    """Replaces a rank's own router loss by its share in that of the group.

    With f_e the share of the group's choices that fall on expert e, and p_e its mean probability, the loss is
    E * sum f_e p_e. f is a constant for the gradient, and p a sum over ranks, so each rank adds E * sum f_e (its part of p_e).

    Args:
        coefficient: of the router loss in the model's loss.
        top_k: experts of a token.
    """

    def __init__(self, coefficient: float, top_k: int) -> None:
        self.coefficient = coefficient
        self.top_k = top_k
        self._checked = False

    def local(self, output: Any) -> Tensor:
        """What the model has added to its loss."""
        return self.coefficient * output.aux_loss

    def share(self, output: Any, plan: DcpPlan) -> Tensor:
        """This rank's share, with gradient; the shares of a group add up to the router loss of its batch. Collective.

        Raises:
            RuntimeError: at the first call, if the model's own router loss is another function.
        """
        logits: Sequence[Tensor] = output.router_logits
        choices, chances = zip(*(_counts(layer, self.top_k) for layer in logits))
        choice, chance, rows = sum(choices), sum(chances), len(logits) * logits[0].shape[0]
        if not self._checked:
            own = choice.shape[0] * (choice * chance).sum() / rows**2
            if not torch.allclose(own, output.aux_loss.float(), rtol=1e-3):
                raise RuntimeError("the model's router loss is not Mixtral's: set output_router_logits=False")
            self._checked = True
        if plan.rank_plan.num_local == 0:  # a dummy row
            choice, chance, rows = torch.zeros_like(choice), 0 * chance, 0
        totals = torch.cat([choice.detach(), choice.new_tensor([rows])])
        if plan.rank_plan.world_size > 1:
            group = find_communicator(plan.communicator, plan.rank_plan.world_size)
            totals = totals.to(group.device)
            dist.all_reduce(totals, group=group.forward_group)
        totals = totals.to(chance)
        return self.coefficient * choice.shape[0] * (totals[:-1] * chance).sum() / totals[-1] ** 2


def _counts(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """How often each expert is chosen, and the sum of its probabilities: fp32[experts] each."""
    chances = torch.softmax(logits, -1)
    chosen = torch.topk(chances, top_k, -1).indices.flatten()
    ones = torch.ones(len(chosen), dtype=torch.float32, device=logits.device)
    return ones.new_zeros(logits.shape[-1]).index_add_(0, chosen, ones), chances.float().sum(0)
