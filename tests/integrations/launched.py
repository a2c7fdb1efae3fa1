"""A program for `accelerate launch`: a plain loop with Accelerate, and one with FSDP2; it writes what it has trained."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hf_dcp
from tests.integrations.small import random_lengths, rows, small_llama

ACCUMULATION, TOKENS, RATE = 2, 100, 0.05
DATA = rows(random_lengths(16))


def batches_of(dcp: hf_dcp.DcpParallelismConfig) -> Any:
    """Batches for any number of groups up to two."""
    return dcp.batched(DATA, tokens_per_batch=TOKENS, multiple_of=2)


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def loop(accelerator: Accelerator, dcp: hf_dcp.DcpParallelismConfig, sharded: bool) -> dict[str, Any]:
    """One epoch."""
    model = small_llama()
    loader = hf_dcp.DcpDataLoader(batches_of(dcp), config=dcp, model=model, accumulation=ACCUMULATION)
    if sharded:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    if not sharded:
        model, optimizer = accelerator.prepare(model, optimizer)
    losses, total = [], torch.zeros(())
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(**batch, use_cache=False).loss
            accelerator.backward(loss * ACCUMULATION)  # Accelerate divides by it
            total += loss.detach()
            if number % ACCUMULATION == ACCUMULATION - 1 or number == len(loader) - 1:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(accelerator.reduce(total, "mean")))
                total = torch.zeros(())
    parameters = torch.cat([whole(p.detach()).flatten() for p in model.parameters()])
    return {"losses": losses, "parameters": parameters.tolist()}


def main() -> None:
    target, size = Path(sys.argv[1]), os.environ.pop("HF_DCP_SIZE")
    accelerator = Accelerator(cpu=True)
    answer: dict[str, Any] = {"world": dist.get_world_size()}
    try:
        hf_dcp.DcpParallelismConfig().setup()
    except ValueError as error:
        answer["no size"] = str(error)
    os.environ["HF_DCP_SIZE"] = size
    for name in ("loop", "FSDP2"):
        accelerator.free_memory()
        type(accelerator.state)._reset_state()
        dcp = hf_dcp.DcpParallelismConfig(dcp=hf_dcp.DcpConfig(block_size=8))
        answer["dcp_size"] = dcp.dcp_size
        accelerator = Accelerator(cpu=True, parallelism_config=dcp, gradient_accumulation_steps=ACCUMULATION)
        answer[name] = loop(accelerator, dcp, sharded=name == "FSDP2")
    if accelerator.is_main_process:
        target.write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
