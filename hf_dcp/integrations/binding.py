"""A model in a run: checked once, and watched by two forward hooks."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from hf_dcp.data.rows import IGNORE
from hf_dcp.integrations.models import attention_layers, base_model, check_model
from hf_dcp.integrations.trl_model import watch_log_probs
from hf_dcp.lookahead.batch_plan import BatchPlan
from hf_dcp.lookahead.session import Session
from hf_dcp.runtime import DcpPlan, find_communicator

_bound: weakref.WeakKeyDictionary[nn.Module, Binding] = weakref.WeakKeyDictionary()


def attach(model: nn.Module, session: Session) -> None:
    """Check ``model``, tell the session its attention, and watch its forward calls.

    Raises:
        ValueError: if DCP can't run the model.
    """
    session.bind(check_model(model, autocast_dtype()))
    base = base_model(model)
    if base in _bound:
        _bound[base].session = session
        return
    binding = _bound[base] = Binding(session, len(attention_layers(base)))
    base.register_forward_pre_hook(binding.before, with_kwargs=True)
    base.register_forward_hook(binding.after, with_kwargs=True)
    watch_log_probs(base)


def autocast_dtype() -> torch.dtype | None:
    """The type in which Accelerate's mixed precision runs attention, or None."""
    if not AcceleratorState._shared_state:
        return None
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(AcceleratorState().mixed_precision)


class Binding:
    """The hooks of one model.

    Args:
        layers: attention layers, which must all call DCP.
    """

    def __init__(self, session: Session, layers: int) -> None:
        self.session = session
        self.layers = layers
        self._checked = False
        self._calls_before = 0

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        plan = kwargs.get("dcp_plan")
        if isinstance(plan, BatchPlan):
            self.session.see(plan)
        if isinstance(plan, DcpPlan):
            self._calls_before = plan.stats.calls["forward"]

    def after(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """After the first call, count layers; in evaluation, make the loss that of the whole batch."""
        plan = kwargs.get("dcp_plan")
        if not isinstance(plan, DcpPlan):
            return output
        if not self._checked:
            self._check_calls(module, plan.stats.calls["forward"] - self._calls_before)
        if not module.training and isinstance(getattr(output, "loss", None), Tensor):
            output.loss = self._group_loss(output.loss.detach(), plan, kwargs)
        return output

    def _check_calls(self, module: nn.Module, calls: int) -> None:
        if calls != self.layers:
            raise RuntimeError(
                f"{type(module).__name__} has {self.layers} attention layers, but DCP was called {calls} times in a "
                f"forward: "
                "its attention does not go through the attention interface, so DCP can't run it"
            )
        self._checked = True

    def _group_loss(self, loss: Tensor, plan: DcpPlan, kwargs: dict[str, Any]) -> Tensor:
        """Mean loss over the group's batch, divided by what the caller multiplies it with."""
        labels = kwargs.get("shift_labels")
        if labels is None:
            return loss
        count = (labels != IGNORE).sum()
        items = kwargs.get("num_items_in_batch")
        # Without labels the local mean is 0 / 0: this rank adds nothing.
        total = torch.where(count > 0, loss * (count if items is None else items), 0.0)
        sums = torch.stack([total.double(), count.double()])
        if plan.rank_plan.world_size > 1:
            communicator = find_communicator(plan.communicator, plan.rank_plan.world_size)
            sums = sums.to(communicator.device)
            dist.all_reduce(sums, group=communicator.forward_group)
        scale = self.session.loss_scale if items is not None else 1
        return (sums[0] / sums[1] / scale).to(loss)
