#!/usr/bin/env python
"""How much of the exchange hides behind compute: two ranks with a core each, on an emulated link.

    benchmarks/netcluster 2 1 100 -- python benchmarks/overlap.py

Divisions are cut for rates that are measured first, as `hf-dcp bench calibrate` does.
For every batch the step is compared with its bound: 1.15 x compute alone + what the plan leaves uncovered (exchanges
with no compute between their start and their end), each measured alone in the same rounds. Behind it, where a step's time
went, on average over the ranks: attention, waiting for exchanges, reduction, and all else.
"""

from __future__ import annotations

import argparse
import json

from hf_dcp.bench.batches import with_mask
from hf_dcp.bench.calibrate import CalibrationSettings, calibrate
from hf_dcp.bench.contestants import exchange_only, make_contestants, uncovered
from hf_dcp.bench.group import Group
from hf_dcp.bench.measure import collect, measure
from hf_dcp.bench.spans import PARTS
from hf_dcp.config import DcpConfig
from hf_dcp.planning.batch import ModelShape
from hf_dcp.planning.plan import PASSES
from hf_dcp.rates import Rates
from hf_dcp.runtime.handle import DcpPlan

SHAPE = ModelShape(heads=8, kv_heads=2, head_dim=64, dtype="fp32")
CASES = [
    ([8192], "causal"),
    ([6000, 1500, 692], "causal"),
    ([8192], "shared:0.2x4"),
    ([5000, 2500, 692], "shared:0.2x4"),
    ([8192], "lambda:64,2048"),
]
SHARE = 1.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    group = Group.join()
    rows = []
    try:
        config = DcpConfig(hardware=Rates(**calibrate(CalibrationSettings(SHAPE), group)["rates"]))
        for lengths, mask in CASES:
            rows.append(one(lengths, mask, options.repeats, group, config))
            if group.rank == 0 and not options.json:
                print_row(rows[-1])
    finally:
        group.leave()
    if group.rank == 0 and options.json:
        print(json.dumps(rows))


def one(lengths: list[int], mask: str, repeats: int, group: Group, config: DcpConfig) -> dict:
    (contestant,) = make_contestants(["dcp"], with_mask(lengths, mask), group, SHAPE, config, alone=True)
    open_ones: dict[str, list[int]] = {}
    for found in group.gather(uncovered(contestant.rank_plan)):
        for which, exchanges in found.items():
            open_ones[which] = sorted({*open_ones.get(which, []), *exchanges})
    number = None if group.communicator is None else group.communicator.id
    plan = exchange_only(contestant.rank_plan, open_ones)
    contestant.alone["uncovered"] = DcpPlan(plan, number, device=group.device)
    (timing,) = measure([contestant], group, repeats, warmup=1)
    report = collect(contestant, timing, group)
    totals = {
        name: sum(report[which][name] for which in PASSES)
        for name in ("seconds", "compute_s", "exchange_s", "uncovered_s")
    }
    parts = {name: sum(report[which]["decomposition"][name] for which in PASSES) for name in PARTS}
    bound = SHARE * totals["compute_s"] + totals["uncovered_s"]
    return {"lengths": lengths, "mask": mask, **totals, "bound_s": bound, "parts": parts, "passes": report}


def print_row(row: dict) -> None:
    times = " ".join(f"{row[name]:8.3f}" for name in ("seconds", "compute_s", "exchange_s", "uncovered_s", "bound_s"))
    verdict = "hidden" if row["seconds"] <= row["bound_s"] else "over"
    if row["compute_s"] < row["exchange_s"]:
        verdict = "exchange is longer than compute"
    parts = " ".join(f"{row['parts'][name]:.3f}" for name in PARTS)
    print(f"{row['mask']:14} {row['lengths']!s:20} {times}  {verdict:6} ({parts})", flush=True)


if __name__ == "__main__":
    main()
