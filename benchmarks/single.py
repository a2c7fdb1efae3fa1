#!/usr/bin/env python
"""One rank: attention by plan against torch's own causal attention, in one run, in turns.

    OMP_NUM_THREADS=1 python benchmarks/single.py

The bound of a mask is the time of torch's causal attention x (attended area / causal area) x 1.10 (causal) or 1.30. Also
printed: CPU time to prepare the plan, once per plan and process, however many layers there are.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from hf_dcp.bench.batches import attended, with_mask
from hf_dcp.bench.contestants import make_contestants
from hf_dcp.bench.group import Group
from hf_dcp.bench.measure import WHOLE, measure
from hf_dcp.config import DcpConfig
from hf_dcp.planning.batch import ModelShape
from hf_dcp.planning.plan import PASSES
from hf_dcp.runtime.executor import Executor
from hf_dcp.runtime.handle import DcpPlan

SHAPE = ModelShape(heads=8, kv_heads=2, head_dim=64, dtype="fp32")
MASKS = ("causal", "lambda:64,4096", "lambda:8,512", "blockwise:256,2,1,1", "blockwise:32,2,1,1", "shared:0.2x4")
LIMITS = {"causal": 1.10}
LIMIT = 1.30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    group = Group.join()
    contestants, areas = [], {}
    for mask in MASKS:
        batch = with_mask([options.length], mask)
        names = ["dcp", "sdpa"] if mask == "causal" else ["dcp"]
        for one in make_contestants(names, batch, group, SHAPE, DcpConfig(), alone=False):
            one.name = mask if one.name == "dcp" else one.name
            contestants.append(one)
        areas[mask] = attended(batch)
    timings = measure(contestants, group, options.repeats, warmup=1)
    seconds = {
        c.name: sum(sorted(t.seconds[WHOLE, which])[options.repeats // 2] for which in PASSES)
        for c, t in zip(contestants, timings)
    }
    rows = []
    for one in contestants:
        if one.name == "sdpa":
            continue
        share = areas[one.name] / areas["causal"]
        rows.append(
            {
                "mask": one.name,
                "seconds": seconds[one.name],
                "sdpa_causal_s": seconds["sdpa"],
                "area": share,
                "ratio": seconds[one.name] / (share * seconds["sdpa"]),
                "limit": LIMITS.get(one.name, LIMIT),
                "prepare_ms": 1e3 * prepare_s(one.plan),
            }
        )
    for row in rows:
        print(json.dumps(row) if options.json else text(row))


def prepare_s(plan: DcpPlan) -> float:
    """CPU seconds that an executor takes to prepare both passes of a plan."""
    executor = Executor(plan)
    begin = time.process_time()
    for which in PASSES:
        executor.prepared(None, which)
    return time.process_time() - begin


def text(row: dict) -> str:
    return (
        f"{row['mask']:20} {row['seconds']:7.3f} s, area {row['area']:.3f} x causal, "
        f"{row['ratio']:.3f} x torch (limit {row['limit']:.2f}), prepared in {row['prepare_ms']:.1f} ms"
    )


if __name__ == "__main__":
    main()
