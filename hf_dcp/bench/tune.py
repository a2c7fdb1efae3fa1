"""Which of the shipped tile shapes is the fastest on this GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from hf_dcp.bench.kernel_timing import measure
from hf_dcp.config import DcpConfig
from hf_dcp.masks import causal
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.planner import plan_batch
from hf_dcp.runtime.handle import DcpPlan
from hf_dcp.runtime.kernels import tuning
from hf_dcp.runtime.messages import DTYPES
from hf_dcp.runtime.passes import Features

TOKENS = 8192


def tune(
    heads: int, kv_heads: int, head_dim: int, dtype: str, device: str, tokens: int = TOKENS, kernel: str = "auto"
) -> list[dict[str, Any]]:
    """The fastest shape of each kernel on one causal sequence: what `hf_dcp.runtime.kernels.tuning.load` reads.

    Returns:
        By kernel {"kernel", "head_dim", "shape", "ms": milliseconds of the pass by shape}.
    """
    shape = ModelShape(heads, kv_heads, head_dim, dtype, ((None, 1),))
    plan = plan_batch(BatchSpec([tokens], [causal()]), Topology((0,)), shape, DcpConfig()).rank(0)
    executor: Any = DcpPlan(plan, device=device, kernel=kernel).executor
    kind: dict[str, Any] = {"dtype": DTYPES[dtype], "device": device}
    q, k, v = (torch.randn(1, n, tokens, head_dim, **kind) for n in (heads, kv_heads, kv_heads))
    features = Features(None, 1 / math.sqrt(head_dim))
    result = executor.forward(q, k, v, None, features)
    passes: dict[str, Callable[[], Any]] = {
        "forward": lambda: executor.forward(q, k, v, None, features),
        "dq": lambda: executor.backward(result.out, q, k, v, None, result, features),
    }
    passes["dkv"] = passes["dq"]
    found = []
    for name, run in passes.items():
        default, times = executor.configs[name], {}
        for tile_shape in tuning.shapes(name, head_dim):
            executor.configs[name] = tuning.Config(tile_shape, default.pack)
            times[str(tile_shape)] = measure(run, device) * 1e3
        executor.configs[name] = default
        best = min(times, key=lambda text: times[text])
        found.append({"kernel": name, "head_dim": head_dim, "shape": best, "ms": times})
    return found
