"""The second half of the self-test: a training step of a small Llama on all ranks against one process in fp64."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_dcp  # noqa: F401  (registers attn_implementation="dcp")
from hf_dcp.planning.planner import plan_batch
from hf_dcp.runtime.cases import Case, allowed_of
from hf_dcp.runtime.groups import Communicator
from hf_dcp.runtime.handle import DcpPlan
from hf_dcp.runtime.selftest import run_selftest

STEP_MASKS = ("causal", "lambda:3,33", "shared", "documents")
LENGTHS = (33, 1, 50, 7)
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 1e-5
IGNORED = -100


def run_everything(masks: list[str] | None, dtype: str, full: bool, device: str = "cpu") -> dict[str, Any]:
    """`run_selftest`, and training steps. Collective over the default process group."""
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() if dist.is_initialized() else 0)
    several = dist.is_initialized() and dist.get_world_size() > 1
    communicator = Communicator.create() if several else None
    result = run_selftest(masks, dtype, full, communicator, device)
    result["steps"] = [run_step(mask, communicator, device) for mask in STEP_MASKS]
    result["ok"] = result["ok"] and all(step["ok"] for step in result["steps"])
    return result


def run_step(mask: str, communicator: Communicator | None, device: str = "cpu") -> dict[str, Any]:
    """Loss and gradients of one step in fp32 against one process: {"name", "loss", "grad", "ok"}.

    ``loss`` and ``grad`` are the relative errors of the loss, and of the gradients (largest difference of any parameter
    over the largest gradient).
    """
    case = Case(mask, LENGTHS, 16, 4, 2, head_dim=16)
    ids, labels, positions = _tokens(case)
    world, rank = (1, 0) if communicator is None else (communicator.world_size, communicator.rank)
    plan = plan_batch(case.batch, case.topology(world), case.shape(), case.config()).rank(rank)
    own = torch.from_numpy(plan.local_tokens())
    dcp_plan = DcpPlan(plan, None if communicator is None else communicator.id, device=device)
    model = _model("dcp").to(device)
    count = int((labels != IGNORED).sum())
    if len(own) == 0:  # a rank without tokens takes part with one dummy token
        local = (torch.zeros(1, dtype=torch.int64), torch.full((1,), IGNORED), torch.zeros(1, dtype=torch.int64))
    else:
        local = (ids[own], labels[own], positions[own])
    own_ids, own_labels, own_positions = (x.to(device) for x in local)
    loss = _loss(model, own_ids, own_labels, own_positions, count, dcp_plan=dcp_plan)
    loss.backward()
    total = loss.detach().clone()
    gradients = [_gradient(parameter) for parameter in model.parameters()]
    if communicator is not None:
        for tensor in (total, *gradients):
            dist.all_reduce(tensor, group=communicator.forward_group)
    want_loss, want = _one_process(case, ids, labels, positions, count)
    largest = max(float(gradient.abs().max()) for gradient in want)
    difference = max(float((a.double().cpu() - b).abs().max()) for a, b in zip(gradients, want))
    loss_error = abs(float(total) - want_loss) / abs(want_loss)
    ok = loss_error <= LOSS_TOLERANCE and difference / largest <= GRADIENT_TOLERANCE
    return {"name": f"llama {mask}", "loss": loss_error, "grad": difference / largest, "ok": ok}


def _tokens(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, labels shifted inside each sequence, and position ids of the whole batch: int64[N] each."""
    generator = torch.Generator().manual_seed(0)
    batch = case.batch
    ids = torch.randint(0, 97, (batch.num_tokens,), generator=generator)
    labels = ids.roll(-1)
    labels[torch.from_numpy(batch.starts[1:] - 1)] = IGNORED
    positions = [torch.from_numpy(mask.positions(n)) for mask, n in zip(batch.masks, batch.lengths)]
    return ids, labels, torch.cat(positions)


def _model(attention: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).float().train()


def _loss(model: PreTrainedModel, ids: Tensor, labels: Tensor, positions: Tensor, count: int, **kw: Any) -> Tensor:
    logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **kw).logits[0]
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED) / count


def _one_process(case: Case, ids: Tensor, labels: Tensor, positions: Tensor, count: int) -> tuple[float, list[Tensor]]:
    """Loss and gradients of the whole batch in fp64, under a dense mask."""
    mask = torch.full((1, 1, len(ids), len(ids)), torch.finfo(torch.float64).min, dtype=torch.float64)
    for tokens, allowed in allowed_of(case):
        mask[0, 0, tokens, tokens].masked_fill_(allowed, 0.0)
    model = _model("eager").double()
    loss = _loss(model, ids, labels, positions, count, attention_mask=mask)
    loss.backward()
    return loss.item(), [_gradient(parameter) for parameter in model.parameters()]


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
