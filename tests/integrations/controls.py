"""Ways to get a training step wrong, one rule broken in each; and the right way."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hf_dcp
from hf_dcp.data.collator import DcpCollator
from tests.integrations.small import IGNORE, gradients, reference_loss, relative_error, rows, small_llama


class _ShiftAfterCut(DcpCollator):
    """Labels are cut first; the model shifts what the rank has."""

    def cut(self, batch: Any, plan: Any) -> dict[str, Any]:
        local = super().cut(batch, plan)
        whole = torch.full_like(torch.from_numpy(batch.shift_labels), IGNORE)
        whole[1:] = torch.from_numpy(batch.shift_labels)[:-1]
        tokens = plan.rank_plan.local_tokens()
        del local["shift_labels"]
        return local | {"labels": whole[tokens][None] if len(tokens) else local["labels"]}


class _LocalPositions(DcpCollator):
    """Positions are those in the rank's part."""

    def cut(self, batch: Any, plan: Any) -> dict[str, Any]:
        local = super().cut(batch, plan)
        return local | {"position_ids": torch.arange(local["input_ids"].shape[1])[None]}


def controls_on_ranks() -> dict[str, float]:
    """Relative gradient errors of right and of wrong ways, of one batch."""
    # Some of these are wrong only where sequences are cut, which a search may not do with few of them: a ring cuts them all.
    config = hf_dcp.DcpConfig(block_size=8, placement="ring")
    plugin = hf_dcp.DcpParallelismConfig(dcp_size=dist.get_world_size(), dcp=config)
    plugin.setup()
    world, batch = dist.get_world_size(), rows([37, 12, 50, 5])
    reference = small_llama("sdpa")
    total, items = reference_loss(reference, batch)
    (total / items).backward()
    want = gradients(reference)

    def error(collator: DcpCollator, model: torch.nn.Module, scale: float, items: int | None = items) -> float:
        local = collator(batch)
        extra = {} if items is None else {"num_items_in_batch": torch.tensor(items)}
        ddp = DistributedDataParallel(model)  # to be kept until backward: it reduces the gradients
        loss = ddp(**local, **extra, use_cache=False).loss
        (loss * scale).backward()
        return relative_error(gradients(model), want)

    def attached() -> torch.nn.Module:
        model = small_llama()
        plugin.attach(model)
        return model

    right = DcpCollator(plugin.session)
    wrong = items // world
    return {
        "right": error(right, attached(), world),
        "shift after cut": error(_ShiftAfterCut(plugin.session), attached(), world),
        "local positions": error(_LocalPositions(plugin.session), attached(), world),
        "local mean": error(right, attached(), 1, None),
        "not times world": error(right, attached(), 1),
        "divided by the context parallel size": error(right, attached(), world, wrong),
        "two forwards": two_forwards("own plans"),
        "a global current plan": two_forwards("global plan"),
    }


def two_forwards(way: str) -> float:
    """Two forwards with checkpointing before one backward; with one plan for whatever runs, recompute uses the last."""
    # Different plans with equally many tokens on every rank, which the wrong way needs to run at all: even lengths, halved.
    config = hf_dcp.DcpConfig(block_size=8, placement="ring")
    plugin = hf_dcp.DcpParallelismConfig(dcp_size=dist.get_world_size(), dcp=config)
    plugin.setup()
    first, second = rows([40, 24], seed=2), rows([8, 32, 24], seed=3)
    reference = small_llama("sdpa")
    (sum(reference_loss(reference, batch)[0] for batch in (first, second)) / 100).backward()
    model = small_llama()
    plugin.attach(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batches = [DcpCollator(plugin.session)(batch) for batch in (first, second)]
    if way == "global plan":
        current: dict[str, Any] = {}
        for module in model.modules():
            if hasattr(module, "layer_idx") and "Attention" in type(module).__name__:
                module.forward = _with_current(module.forward, current)
    losses = []
    for batch in batches:
        if way == "global plan":
            current["plan"] = batch["dcp_plan"]
        losses.append(model(**batch, num_items_in_batch=torch.tensor(100), use_cache=False).loss)
    sum(losses).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return relative_error(gradients(model), gradients(reference))


def _with_current(forward: Any, current: dict[str, Any]) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **(kwargs | {"dcp_plan": current["plan"]}))

    return wrapped
