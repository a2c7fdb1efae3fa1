"""Steps on two ranks for what users of context parallelism run into; `tests.integrations.test_user_reports` judges them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hf_dcp
from hf_dcp.data.collator import DcpCollator
from hf_dcp.integrations.models import base_model
from tests.integrations.small import (
    IGNORE,
    gradients,
    random_lengths,
    reference_loss,
    relative_error,
    rows,
    small_llama,
)
from tests.integrations.test_trainer import build, fresh

Rows = list[dict[str, Any]]


def plugin_of(**config: Any) -> hf_dcp.DcpParallelismConfig:
    settings = hf_dcp.DcpConfig(**({"block_size": 4} | config))
    plugin = hf_dcp.DcpParallelismConfig(dcp_size=dist.get_world_size(), dcp=settings)
    plugin.setup()
    return plugin


def labels_of(batch: Rows) -> int:
    return sum(sum(label != IGNORE for label in row["labels"][1:]) for row in batch)


def everywhere(local: dict[str, Any], value: Tensor, fill: float = 0.0) -> Tensor:
    """Rows of all ranks in the order of the batch: [tokens, ...]. Collective."""
    plan = local["dcp_plan"].rank_plan
    whole = torch.zeros(plan.num_tokens, *value.shape[1:], dtype=value.dtype)
    if plan.num_local:
        whole[torch.from_numpy(plan.local_tokens())] = value
    dist.all_reduce(whole)
    return whole


def accumulated() -> dict[str, float]:
    """Four micro-batches with 10, 1000, 3 and 250 labels against the one big batch."""
    data = []
    for count, row in zip((10, 1000, 3, 250), rows([40, 1100, 30, 260])):
        ids = row["input_ids"]
        data.append(row | {"labels": [IGNORE] * (len(ids) - count) + ids[-count:]})
    assert [labels_of([row]) for row in data] == [10, 1000, 3, 250]
    plugin, model = plugin_of(block_size=128), small_llama(max_position_embeddings=2048)
    loader = hf_dcp.DcpDataLoader(
        data, config=plugin, model=model, tokens_per_batch=1, accumulation=4, overlong="alone"
    )  # every row is a batch of its own
    ddp, count = DistributedDataParallel(model), 0
    for batch in loader:
        ddp(**batch, use_cache=False).loss.backward()
        count += 1
    reference = small_llama("sdpa", max_position_embeddings=2048)
    (reference_loss(reference, data)[0] / 1263).backward()
    return {"gradients": relative_error(gradients(model), gradients(reference)), "batches": count}


def epoch() -> dict[str, Any]:
    """D rows, one epoch, the processes are one group."""
    fresh()
    data = rows(list(range(4, 17)))  # 13 rows of different lengths
    trainer = build(dist.get_world_size(), data=data, batch=2, max_steps=-1, num_train_epochs=1)
    seen: list[int] = []
    base_model(trainer.model).register_forward_pre_hook(
        lambda module, args, kwargs: seen.extend(kwargs["dcp_plan"].lengths), with_kwargs=True
    )
    trainer.train()
    state = trainer.state
    return {
        "steps": state.global_step, "epoch": state.epoch, "rows": sorted(seen), "tokens": state.num_input_tokens_seen,
        "labels": math.fsum(entry["dcp/tokens"] for entry in state.log_history if "dcp/tokens" in entry),
    }  # fmt: skip


def cut_in_two() -> dict[str, Any]:
    """Eight tokens, four on each rank; once with a prompt that ends at the cut."""
    answers = {}
    plugin = plugin_of(placement="ring")
    plugin.attach(small_llama())
    ids = list(range(11, 19))
    for name, labels in (("all", ids), ("prompt", [IGNORE] * 4 + ids[4:])):
        local = DcpCollator(plugin.session)([{"input_ids": ids, "labels": labels}])
        answers[name] = everywhere(local, local["shift_labels"][0]).tolist()
        answers["rows"] = local["input_ids"].shape[1]
    return answers


def logits_error(batch: Rows, mask: Any = "causal") -> float:
    """Against every row, or every document of it, alone."""
    plugin, model, reference = plugin_of(), small_llama().eval(), small_llama("sdpa").eval()
    plugin.attach(model)
    local = DcpCollator(plugin.session, mask)(batch)
    with torch.no_grad():
        got = everywhere(
            local, model(**{k: v for k, v in local.items() if "label" not in k}, use_cache=False).logits[0]
        )
        parts = [
            p for row in batch for p in torch.tensor(row["input_ids"]).split(row.get("document_lengths", row["length"]))
        ]
        want = torch.cat([reference(input_ids=part[None], use_cache=False).logits[0] for part in parts])
    return float((got - want).abs().max() / want.abs().max())


def nothing_to_attend_to() -> dict[str, float]:
    """The second half of the tokens attends to nothing."""

    def ranges(row: dict[str, Any]) -> np.ndarray:
        made = np.zeros((row["length"], 1, 2), np.int32)
        half = row["length"] // 2
        made[:half, 0, 1] = np.arange(1, half + 1)
        return made

    plugin, model = plugin_of(placement="ring"), small_llama()
    plugin.attach(model)
    batch = rows([32])
    local = DcpCollator(plugin.session, ranges)(batch)
    out = DistributedDataParallel(model)(**local, num_items_in_batch=torch.tensor(31), use_cache=False)
    out.loss.backward()
    values = torch.cat([g.flatten() for g in gradients(model).values()])
    # Their keys and values are read by nobody: the first half's logits are those of a sequence that ends there.
    short = small_llama("sdpa")(input_ids=torch.tensor([batch[0]["input_ids"][:16]]), use_cache=False).logits[0]
    logits = everywhere(local, out.logits[0].detach())
    return {
        "finite": float(torch.isfinite(values).all() and torch.isfinite(logits).all() and torch.isfinite(out.loss)),
        "first half": float((logits[:16] - short.detach()).abs().max()),
    }


def two_models() -> list[float]:
    """Two models and two plugins by turns; in each batch a rank may have nothing to do."""
    pairs = []
    for seed in (0, 1):
        plugin, model = plugin_of(), small_llama(seed=seed, num_attention_heads=4 if seed else 2)
        plugin.attach(model)
        pairs.append((plugin, model, DistributedDataParallel(model), rows([3 + seed, 2], seed=seed)))
    losses = []
    for plugin, _, ddp, batch in pairs:
        local = DcpCollator(plugin.session)(batch)
        losses.append(ddp(**local, num_items_in_batch=torch.tensor(labels_of(batch)), use_cache=False).loss)
    for loss in reversed(losses):
        (loss * dist.get_world_size()).backward()
    errors = []
    for seed, (_, model, _, batch) in enumerate(pairs):
        reference = small_llama("sdpa", seed=seed, num_attention_heads=4 if seed else 2)
        (reference_loss(reference, batch)[0] / labels_of(batch)).backward()
        errors.append(relative_error(gradients(model), gradients(reference)))
    return errors


def with_lora(attention: str) -> nn.Module:
    """The small Llama under LoRA; both matrices of an adapter are random, so that both have gradients."""
    settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(3)
    model = get_peft_model(small_llama(attention), settings)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def lora_gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    assert found and all("lora" in name for name in found)
    return found


def lora(folder: str) -> dict[str, float]:
    """A step with each kind of checkpointing and without, against one process; the trained adapter is saved."""
    batch, answers = rows([37, 12, 50, 5]), {}
    reference = with_lora("sdpa")
    (reference_loss(reference, batch)[0] / labels_of(batch)).backward()
    want = lora_gradients(reference)
    for kind in ("none", "reentrant", "not reentrant"):
        plugin, model = plugin_of(block_size=8), with_lora("dcp")
        plugin.attach(model)
        if kind != "none":
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
        local = DcpCollator(plugin.session)(batch)
        ddp = DistributedDataParallel(model)
        loss = ddp(**local, num_items_in_batch=torch.tensor(labels_of(batch)), use_cache=False).loss
        (loss * dist.get_world_size()).backward()
        answers[kind] = relative_error(lora_gradients(model), want)
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    model.eval()
    with torch.no_grad():
        inputs = {k: v for k, v in local.items() if "label" not in k}
        logits = everywhere(local, model(**inputs, use_cache=False).logits[0])
    if dist.get_rank() == 0:
        torch.save(logits, f"{folder}/logits.pt")
    return answers


def reports_on_ranks(folder: str) -> dict[str, Any]:
    documents = [3, 5, 7, 11]
    return {
        "accumulated": accumulated(),
        "epoch": epoch(),
        "cut": cut_in_two(),
        "seven tokens": logits_error(rows([7])),
        "documents": logits_error([rows([sum(documents)])[0] | {"document_lengths": documents}], "documents"),
        "nothing": nothing_to_attend_to(),
        "two models": two_models(),
        "lora": lora(folder),
        "lengths": random_lengths(1),
    }
