"""Planners spread over an emulated cluster, with Redis on its first node: how many plans does each node make, each once?

    benchmarks/netcluster 4 1 100 -- python benchmarks/store_cluster.py --batches 48

Trains a small model; rank 0 serves the plan store, with a password, and prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from redis_server import serve
from transformers import LlamaConfig, LlamaForCausalLM

import hf_dcp

LENGTHS = torch.randint(100, 400, (400,), generator=torch.Generator().manual_seed(0)).tolist()


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048,
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config, attn_implementation="dcp", dtype=torch.float32)


def shared(text: str) -> str:
    """Rank 0's text, on every rank."""
    frame = torch.zeros(64, dtype=torch.uint8)
    frame[: len(text)] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    dist.broadcast(frame, 0)
    return bytes(frame.tolist()).rstrip(b"\0").decode()


def run(batches: int, lookahead: int, store: str) -> list[int]:
    """Train; for each batch, 1 if this rank planned it, 2 if it did although another one should have."""
    plugin = hf_dcp.DcpParallelismConfig(dcp_size=dist.get_world_size(), plan_store=store, lookahead=lookahead)
    net = model()
    rows = [{"input_ids": [i % 97 for i in range(length)], "length": length} for length in LENGTHS]
    made = []
    loader = hf_dcp.DcpDataLoader(rows, config=plugin, model=net, tokens_per_batch=1000)
    for batch in loader:
        made.append({"planned": 1, "replanned": 2}.get(batch["dcp_plan"].origin, 0))
        net(**batch, use_cache=False).loss.backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
        net.zero_grad()
        if len(made) == batches:
            break
    return made


def report(made: list[int]) -> dict[str, Any]:
    """Collective; from the answers of all ranks."""
    mine = torch.tensor([*made, int(os.environ["GROUP_RANK"])])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    table = torch.stack(everyone)
    plans, nodes = table[:, :-1], table[:, -1].tolist()
    by_node = {
        f"node{n}": int((plans[[i for i, m in enumerate(nodes) if m == n]] == 1).sum()) for n in sorted(set(nodes))
    }
    return {
        "batches": plans.shape[1],
        "plans_by_node": by_node,
        "replanned": int((plans == 2).sum()),
        "each_made_once": bool(((plans == 1).sum(0) == 1).all()) and not bool((plans == 2).any()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batches", type=int, default=48)
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--port", type=int, default=6399)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    os.environ["HF_DCP_REDIS_PASSWORD"] = shared(secrets.token_hex(16))
    with ExitStack() as stack:
        if dist.get_rank() == 0:
            host, password = os.environ["MASTER_ADDR"], os.environ["HF_DCP_REDIS_PASSWORD"]
            stack.enter_context(serve(host, options.port, password))
        dist.barrier()
        made = run(options.batches, options.lookahead, f"redis://{os.environ['MASTER_ADDR']}:{options.port}/0")
        answer = report(made)
        dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
