#!/usr/bin/env python
"""Peak memory of attention, forward and backward, per local token: refetch against keep.

    python benchmarks/memory.py --ranks 2

Every measurement is one step in new processes: the peak of the resident set, as Linux counts it, over what it was
before the step, when Q, K, V and the gradient of the output were there already.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hf_dcp.bench.batches import with_mask
from hf_dcp.bench.contestants import make_contestants
from hf_dcp.bench.group import Group
from hf_dcp.config import DcpConfig
from hf_dcp.planning.batch import ModelShape
from hf_dcp.runtime.processes import run_processes

SHAPE = ModelShape(heads=8, kv_heads=2, head_dim=64, dtype="fp32")
LENGTHS = (4096, 8192, 16384)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--masks", nargs="*", default=["causal", "lambda:8,512"])
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    options = parser.parse_args()
    for mask in options.masks:
        for length in options.lengths:
            for keep in ("refetch", "keep"):
                ranks = run_processes(measured, options.ranks, mask, length, keep, timeout=300.0)
                worst = max(ranks, key=lambda row: row["peak_bytes"] / max(row["tokens"], 1))
                setting = {"mask": mask, "length": length, "ranks": options.ranks, "backward_kv": keep}
                each = {"bytes_per_token": round(worst["peak_bytes"] / max(worst["tokens"], 1))}
                print(json.dumps({**setting, **worst, **each}), flush=True)


def measured(mask: str, length: int, keep: str) -> dict[str, Any]:
    """One step on this rank of the default process group."""
    group = Group.join(nodes=1)
    config = DcpConfig(backward_kv=keep)  # type: ignore[arg-type]
    warm, own = (
        make_contestants(["dcp"], with_mask([n], mask), group, SHAPE, config, alone=False)[0] for n in (256, length)
    )
    warm.backward(warm.forward(warm.plan))
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    before = resident("VmRSS")
    own.backward(own.forward(own.plan))
    part = own.rank_plan.windows[0]
    return {
        "tokens": own.rank_plan.num_local,
        "remote_q_rows": int(part.q_remote[:, 1].sum()) // own.rank_plan.head_groups,
        "remote_kv_rows": int(part.kv_remote[:, 1].sum()) // own.rank_plan.head_groups,
        "peak_bytes": resident("VmHWM") - before,
        "shared_buffer_bytes": own.plan.executor.buffers.peak,
    }


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


if __name__ == "__main__":
    main()
