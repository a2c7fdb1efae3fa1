"""One training step of a small Llama under every parallel form, on four ranks; each returns loss and whole gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import hf_dcp
from hf_dcp.data.collator import DcpCollator
from hf_dcp.runtime.handle import find_plan
from tests.integrations.small import IGNORE, VOCABULARY, rows, small_llama

Step = dict[str, Any]
BATCH = rows([37, 12, 50, 5])
SECOND = rows([20, 31, 9], seed=7)
LAYERS = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
if Version(transformers.__version__) < Version("5.23"):  # it cuts a head over tensor parallel ranks only evenly
    LAYERS["vocab_size"] = VOCABULARY + 1


def labels_of(batch: list[dict[str, Any]]) -> int:
    return sum(sum(label != IGNORE for label in row["labels"][1:]) for row in batch)


def plugin_of(dcp_size: int, **sizes: int) -> hf_dcp.DcpParallelismConfig:
    plugin = hf_dcp.DcpParallelismConfig(dcp_size=dcp_size, dcp=hf_dcp.DcpConfig(block_size=8), **sizes)
    plugin.setup()
    return plugin


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """By name, without what wrappers add to it. Collective."""
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        found[name.removeprefix("module.")] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).detach().cpu()
    return found


def run_step(
    model: nn.Module, inputs: dict[str, Any], items: int, average: int, data_ranks: list[int] | None = None
) -> Step:
    """Forward and backward; gradients are averaged over ``average`` ranks by the wrapper."""
    loss = model(**inputs, num_items_in_batch=torch.tensor(items), use_cache=False).loss
    (loss * average).backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return {"loss": float(total) * average / dist.get_world_size(), "gradients": whole_gradients(model)}


def ddp() -> Step:
    plugin, model = plugin_of(4), small_llama(**LAYERS)
    plugin.attach(model)
    return run_step(DistributedDataParallel(model), DcpCollator(plugin.session)(BATCH), labels_of(BATCH), 4)


def sharded(mesh: DeviceMesh, policy: OffloadPolicy) -> Step:
    plugin, model = plugin_of(4), small_llama(**LAYERS)
    plugin.attach(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return run_step(model, DcpCollator(plugin.session)(BATCH), labels_of(BATCH), 4)


def fsdp() -> Step:
    return sharded(init_device_mesh("cpu", (4,)), OffloadPolicy())


def fsdp_offload() -> Step:
    return sharded(init_device_mesh("cpu", (4,)), CPUOffloadPolicy(pin_memory=False))


def hsdp() -> Step:
    return sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")), OffloadPolicy())


def two_groups() -> Step:
    """Two DCP groups of two, each with a batch of its own, sharded over all four ranks."""
    plugin, model = plugin_of(2), small_llama(**LAYERS)
    plugin.attach(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    batch = (BATCH, SECOND)[plugin.session.require_group().dp_rank]
    return run_step(model, DcpCollator(plugin.session)(batch), labels_of(BATCH) + labels_of(SECOND), 4)


def tensor_parallel(folder: str) -> Step:
    """Transformers' own plan for two tensor parallel ranks and FSDP2 over the two ranks of each DCP group."""
    plugin = plugin_of(2, tp_size=2)
    settings = DistributedConfig(tp_size=2, tp_plan="auto", fsdp_size=2)
    model = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=settings, attn_implementation="dcp", dtype=torch.float32
    )
    plugin.attach(model)
    return run_step(model, DcpCollator(plugin.session)(BATCH), labels_of(BATCH), 2)


class Stage(nn.Module):
    """Some layers of a Llama. Tensors between stages have one length; a plan's own rows come first.

    Args:
        model: of which the layers are.
        numbers: of the layers.
    """

    def __init__(self, model: PreTrainedModel, numbers: range) -> None:
        super().__init__()
        self.first, self.last = numbers.start == 0, numbers.stop == len(model.model.layers)
        self.embed = model.model.embed_tokens if self.first else None
        self.layers = nn.ModuleDict({str(i): model.model.layers[i] for i in numbers})
        self.rotary = model.model.rotary_emb
        self.norm, self.head = (model.model.norm, model.lm_head) if self.last else (None, None)

    def forward(self, x: Tensor, positions: Tensor, handle: Tensor) -> Tensor:
        plan = find_plan(int(handle))
        length, count = x.shape[1], plan.num_rows
        x = x[:, :count]
        if self.embed is not None:
            x = self.embed(x)
        angles = self.rotary(x, positions[:, :count])
        for layer in self.layers.values():
            x = layer(x, position_embeddings=angles, attention_mask=None, dcp_plan=plan)
        if self.norm is not None:
            x = self.head(self.norm(x))
        return nn.functional.pad(x, (0, 0, 0, length - count))


MICRO = (BATCH, SECOND, rows([60], seed=8), rows([7, 2, 3, 25], seed=9))


def pipeline(schedule: type) -> Step:
    """Two stages of two ranks each (ranks 0, 1 and 2, 3); four micro-batches, each with a plan of its own."""
    plugin, model = plugin_of(2), small_llama(**LAYERS)
    plugin.attach(model)
    number = dist.get_rank() // 2
    stage = Stage(model, range(2 * number, 2 * number + 2))
    group = next(g for g in (dist.new_group([0, 2]), dist.new_group([1, 3])) if dist.get_rank(g) >= 0)
    micro = [DcpCollator(plugin.session)(batch) for batch in MICRO]
    longest = torch.tensor(max(batch["input_ids"].shape[1] for batch in micro))
    dist.all_reduce(longest, dist.ReduceOp.MAX)

    def stacked(name: str, fill: int) -> Tensor:
        return torch.cat([nn.functional.pad(b[name], (0, int(longest) - b[name].shape[1]), value=fill) for b in micro])

    ids, positions, labels = (stacked(*x) for x in (("input_ids", 0), ("position_ids", 0), ("shift_labels", IGNORE)))
    handles = torch.tensor([batch["dcp_plan"].handle for batch in micro])
    items = sum(labels_of(batch) for batch in MICRO)

    def loss_of(logits: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits[0], target[0], ignore_index=IGNORE, reduction="sum") / items

    hidden = torch.empty(1, int(longest), model.config.hidden_size, requires_grad=True)
    logits = torch.empty(1, int(longest), model.config.vocab_size, requires_grad=True)
    # Shapes are given: found out by a trial on the meta device, they would want the number of a plan.
    ends = {"input_args": hidden if number else ids[:1], "output_args": logits if number else hidden}
    part = PipelineStage(stage, number, 2, torch.device("cpu"), group=group, **ends)
    pipe = schedule(part, len(MICRO), loss_of, scale_grads=False)
    losses: list[Tensor] = []
    if number == 0:
        pipe.step(ids, positions=positions, handle=handles)
    else:
        pipe.step(target=labels, losses=losses, positions=positions, handle=handles)
    total = torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros(())
    dist.all_reduce(total)
    grads = {}
    for name, parameter in model.named_parameters():  # of the other stage: None
        grads[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
        dist.all_reduce(grads[name])
    return {"loss": float(total), "gradients": grads}


FORMS: dict[str, tuple[Callable[..., Step], list[list[dict[str, Any]]]]] = {
    "DDP": (ddp, [BATCH]),
    "FSDP2": (fsdp, [BATCH]),
    "FSDP2 with CPU offload": (fsdp_offload, [BATCH]),
    "HSDP": (hsdp, [BATCH]),
    "data parallel x DCP": (two_groups, [BATCH, SECOND]),
    "tensor parallel x FSDP2 x DCP": (tensor_parallel, [BATCH]),
    "pipeline x DCP, GPipe": (lambda: pipeline(ScheduleGPipe), list(MICRO)),
    "pipeline x DCP, 1F1B": (lambda: pipeline(Schedule1F1B), list(MICRO)),
}
"""The step, and the batches that it is of."""
