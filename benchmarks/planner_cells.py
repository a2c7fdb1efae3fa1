"""Four batches times four masks on 4 nodes of 8 devices: bytes, balance and CPU seconds of plans.

    python benchmarks/planner_cells.py [--runs 3] [--batch a_1x131072] [--seeds 1] [--exposure]

Forward bytes in MB (1e6), between nodes / in total; a mark shows cells above the figures that plans should reach. With
--exposure, predicted milliseconds of forward and of backward follow: exposed exchange, what local tiles can't cover of the
first exchange and the last return, exchange of the busiest device, exchange and compute of the mean device; divisions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from hf_dcp.config import DcpConfig
from hf_dcp.masks import parse_mask
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.exposure import exposure
from hf_dcp.planning.plan import PASSES, Plan
from hf_dcp.planning.planner import plan_batch

MASKS = ("causal", "lambda:64,4096", "blockwise:256,2,1,1", "shared:0.2x4")
GOALS = {  # MB between nodes, in total
    "a": ((284, 1350), (12.8, 132.1), (4.8, 49.1), (81, 910)),
    "b": ((0, 515), (0, 119.1), (0, 44.4), (0, 256.8)),
    "c": ((20, 290), (0, 112), (0, 32), (14, 150)),
    "d": ((0, 0), (0, 0), (0, 0), (0, 0)),
}


def measured(batch: BatchSpec, config: DcpConfig, runs: int) -> tuple[Plan, dict[str, float]]:
    """The plan, and its CPU seconds by part: medians of all runs but the first."""
    topology, shape = Topology.grid(4, 8), ModelShape(8, 2, 128)
    laps = []
    for _ in range(runs + 1):
        plan = plan_batch(batch, topology, shape, config)
        since = time.process_time()
        for rank_plan in plan.rank_plans:
            rank_plan.to_bytes()
        laps.append({**plan.cpu_s, "serialise": plan.cpu_s.get("serialise", 0.0) + time.process_time() - since})
    return plan, {part: statistics.median(lap[part] for lap in laps[1:]) for part in laps[0]}


def row(name: str, mask: str, plan: Plan, seconds: dict[str, float], goal: tuple[float, float]) -> str:
    forward = plan.score.passes["forward"]
    inter, total = forward.inter_node / 1e6, (forward.inter_node + forward.intra_node) / 1e6
    above = " ".join(mark for mark, value, limit in (("<", inter, goal[0]), ("<<", total, goal[1])) if value > limit)
    parts = " ".join(f"{part} {value:.3f}" for part, value in seconds.items())
    return (
        f"{name:3} {mask:20} {inter:7.2f} / {total:7.1f} (goal {goal[0]:6.1f} / {goal[1]:6.1f}) {above:4}"
        f" compute {plan.score.compute_imbalance:.3f} tokens {plan.score.token_imbalance:.3f} {plan.score.status:10}"
        f" {sum(seconds.values()):.3f} s ({parts}) blocks {len(plan.blocks)} {plan.placement.name}"
    )


def exposures(plan: Plan) -> str:
    """A line for each pass."""
    lines = []
    for which in PASSES:
        found = exposure(plan.rank_plans, which, plan.config.rates)
        times = (found.exposed_s, found.uncoverable_s, found.exchange_s, found.mean_exchange_s, found.mean_compute_s)
        most = max(len(getattr(part.windows[0], which).divisions) - 1 for part in plan.rank_plans)
        mark = "" if found.exposed_s <= found.allowed_s else " <"
        lines.append(f"    {which:8} " + " / ".join(f"{t * 1e3:.3f}" for t in times) + f" ms, {most} divisions{mark}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--batch", default=None, help="a, b, c or d; default: all")
    parser.add_argument("--mask", default=None, help="one of the masks; default: all")
    parser.add_argument("--seeds", type=int, default=1, help="seeds of the planner, each in a row")
    parser.add_argument("--exposure", action="store_true", help="also predicted times")
    arguments = parser.parse_args()
    batches = json.loads((Path(__file__).parent / "data" / "reference_batches.json").read_text())["batches"]
    for key, lengths in batches.items():
        name = key.split("_")[0]
        if arguments.batch not in (None, name):
            continue
        for mask, goal in zip(MASKS, GOALS[name], strict=True):
            if arguments.mask not in (None, mask):
                continue
            batch = BatchSpec(lengths, parse_mask(mask))
            for seed in range(arguments.seeds):
                plan, seconds = measured(batch, DcpConfig(seed=seed), arguments.runs)
                print(row(name, mask, plan, seconds, goal), flush=True)
                if arguments.exposure:
                    print(exposures(plan), flush=True)


if __name__ == "__main__":
    main()
