"""A model in a run: checked once, and watched by two forward hooks."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from hf_dcp.data.rows import IGNORE
from hf_dcp.integrations.models import base_model, check_attention
from hf_dcp.integrations.rope import GroupPositions, depends_on_length
from hf_dcp.integrations.router import RouterLoss, router_coefficient
from hf_dcp.integrations.trl_model import watch_log_probs
from hf_dcp.lookahead.batch_plan import BatchPlan
from hf_dcp.lookahead.session import Session
from hf_dcp.runtime import DcpPlan, find_communicator
from hf_dcp.runtime.handle import find_plan
from hf_dcp.runtime.kernels.choose import choose_kernel

_bound: weakref.WeakKeyDictionary[nn.Module, Binding] = weakref.WeakKeyDictionary()


def attach(model: nn.Module, session: Session) -> None:
    """Check ``model``, tell the session its attention, and watch its forward calls.

    Raises:
        ValueError: if DCP can't run the model, or the kernels of the settings can't run here.
    """
    found = check_attention(model, autocast_dtype())
    base = base_model(model)
    coefficient = router_coefficient(base)
    if is_compiled(base):
        _refuse_compiled(base, session)
    choose_kernel(session.config.kernel, run_device(), found.shape.dtype, found.shape.head_dim)
    session.bind(found.shape)
    if base in _bound:
        _bound[base].session = session
        return
    binding = _bound[base] = Binding(session, base, found.calls)
    if coefficient:
        binding.router = RouterLoss(coefficient, base.config.get_text_config().num_experts_per_tok)
    base.register_forward_pre_hook(binding.before, with_kwargs=True)
    base.register_forward_hook(binding.after, with_kwargs=True)
    watch_log_probs(base)


def is_compiled(model: nn.Module) -> bool:
    """Whether ``model.forward = torch.compile(model.forward)`` was said: hooks then stay outside of the graph."""
    return hasattr(model.forward, "_torchdynamo_orig_callable")


def plan_of(kwargs: dict[str, Any]) -> DcpPlan | None:
    """The plan among the arguments of a forward; a compiled one has got its handle."""
    plan = kwargs.get("dcp_plan")
    if type(plan) is int:
        return find_plan(plan)
    return plan if isinstance(plan, DcpPlan) else None


def _refuse_compiled(model: nn.Module, session: Session) -> None:
    if session.config.backward_kv == "keep":
        raise ValueError('backward_kv="keep" can\'t be honoured in a compiled forward: use "refetch"')
    if any(depends_on_length(getattr(module, "rope_type", None)) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} has a RoPE that depends on the longest position, which can't be compiled with DCP: "
            "leave model.forward as it is"
        )


def run_device() -> torch.device:
    """Where Accelerate runs models; the CPU as long as it doesn't run."""
    return AcceleratorState().device if AcceleratorState._shared_state else torch.device("cpu")


def autocast_dtype() -> torch.dtype | None:
    """The type in which Accelerate's mixed precision runs attention, or None."""
    if not AcceleratorState._shared_state:
        return None
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(AcceleratorState().mixed_precision)


class Binding:
    """The hooks of one model.

    Args:
        model: which is bound.
        calls: calls of attention in a forward, which must all come to DCP.
    """

    def __init__(self, session: Session, model: nn.Module, calls: int) -> None:
        self.session = session
        self.calls = calls
        self.positions = GroupPositions(model)
        self.router: RouterLoss | None = None
        self._checked = False
        self._calls_before = 0

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Note the plan; a compiled forward gets its handle, as it would be compiled anew for every plan object."""
        plan = self.positions.plan = plan_of(kwargs)
        if plan is None:
            return None
        if isinstance(plan, BatchPlan):
            self.session.see(plan)
        self._calls_before = plan.stats.calls["forward"]
        return (args, kwargs | {"dcp_plan": plan.handle}) if is_compiled(module) else None

    def after(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """After the first call, count calls of attention; then correct what is not a sum over a rank's tokens."""
        self.positions.plan = None
        plan = plan_of(kwargs)
        if plan is None:
            return output
        if not self._checked:
            self._check_calls(module, plan.stats.calls["forward"] - self._calls_before)
        if not isinstance(getattr(output, "loss", None), Tensor):
            return output
        loss, router = output.loss, None
        if self.router is not None and getattr(output, "router_logits", None):
            loss, router = loss - self.router.local(output), self.router.share(output, plan)
        if module.training or loss.requires_grad:  # loaded models are in evaluation mode until told otherwise
            output.loss = loss if router is None else loss + router
        else:
            output.loss = self._group_loss(loss.detach(), router, plan, kwargs)
        return output

    def _check_calls(self, module: nn.Module, calls: int) -> None:
        if calls != self.calls:
            raise RuntimeError(
                f"{type(module).__name__} should call attention {self.calls} times in a forward, but DCP was called "
                f"{calls} times: its attention does not go through the attention interface, so DCP can't run it"
            )
        self._checked = True

    def _group_loss(self, loss: Tensor, router: Tensor | None, plan: DcpPlan, kwargs: dict[str, Any]) -> Tensor:
        """Mean loss over the group's batch, divided by what the caller multiplies it with."""
        labels = kwargs.get("shift_labels")
        if labels is None:
            return loss
        items = kwargs.get("num_items_in_batch")
        count = (labels != IGNORE).sum()
        # Without labels the local mean is 0 / 0: this rank adds nothing.
        total = torch.where(count > 0, loss * (count if items is None else items), 0.0)
        scale = self.session.loss_scale if items is not None else 1
        return group_mean(total, count, plan, router).to(loss) / scale


def group_mean(total: Tensor, count: Tensor, plan: DcpPlan, further: Tensor | None = None) -> Tensor:
    """Sum of ``total`` over the group / sum of ``count``, plus the sum of ``further``: fp64. Collective."""
    further = torch.zeros(()) if further is None else further.detach()
    sums = torch.stack([x.double().to(total.device) for x in (total, count, further)])
    if plan.rank_plan.world_size > 1:
        communicator = find_communicator(plan.communicator, plan.rank_plan.world_size)
        sums = sums.to(communicator.device)
        dist.all_reduce(sums, group=communicator.forward_group)
    return sums[0] / sums[1] + sums[2]
