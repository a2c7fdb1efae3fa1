"""RoPE whose angles depend on the longest position of a batch: every rank is shown that of its whole group.

Rows of position ids get one more entry, the group's maximum, and its angles are cut off again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hf_dcp.runtime import DcpPlan, find_communicator

KINDS = ("dynamic", "longrope")


class GroupPositions:
    """The hooks of a model's RoPE modules.

    Args:
        model: whose modules to watch.
    """

    def __init__(self, model: nn.Module) -> None:
        self.plan: DcpPlan | None = None
        """That of the forward that is running."""
        for module in model.modules():
            if depends_on_length(getattr(module, "rope_type", None)):
                module.register_forward_pre_hook(self._before, with_kwargs=True)
                module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        if self.plan is None:
            return None
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        longest = positions.max()
        if self.plan.rank_plan.world_size > 1:
            group = find_communicator(self.plan.communicator, self.plan.rank_plan.world_size)
            longest = longest.to(group.device)
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=group.forward_group)
        longer = torch.cat([positions, longest.to(positions).expand(*positions.shape[:-1], 1)], -1)
        if "position_ids" in kwargs:
            return args, kwargs | {"position_ids": longer}
        return (args[0], longer, *args[2:]), kwargs

    def _after(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Angles are [..., tokens, numbers]."""
        return output if self.plan is None else tree_map_only(Tensor, lambda x: x[..., :-1, :], output)


def depends_on_length(kind: Any) -> bool:
    """Whether angles depend on the longest position. ``kind``: a RoPE type, or one for each type of layer."""
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return any(isinstance(k, str) and any(word in k for word in KINDS) for k in kinds)
