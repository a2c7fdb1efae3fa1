#!/usr/bin/env python
"""Attention under DCP and under static context parallelism on an emulated cluster, cell by cell.

    python benchmarks/cluster.py --nodes 4 --per-node 1 --mbit 100 --results results.jsonl

A cell is one batch and one mask. Cells that the results file holds already are left out, and no new one begins when
``--budget`` seconds are over, so that the command is repeated until it says that nothing is missing. It starts itself
once per rank in `benchmarks/netcluster`, which needs root and iproute2.

Static schemes are many: of the dense ones the two with the least predicted time run, of the row-exact ones the best,
and zigzag beside it on a single sequence. Rates are measured first, as `hf-dcp bench calibrate` does, for the prediction
(`hf_dcp.planning.simulate`) and for the divisions of all plans.
Before its rounds every contestant is prepared: kernel calls, masks, message tables.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_dcp.bench.batches import attended, read_batches, with_mask
from hf_dcp.bench.calibrate import CalibrationSettings, calibrate
from hf_dcp.bench.compare import speedups
from hf_dcp.bench.contestants import DENSE, ROW_EXACT, Contestant, make_contestants, make_rank_plans
from hf_dcp.bench.group import Group
from hf_dcp.bench.measure import WHOLE, Timings, collect, measure
from hf_dcp.config import DcpConfig
from hf_dcp.planning.batch import BatchSpec, ModelShape
from hf_dcp.planning.plan import PASSES
from hf_dcp.planning.simulate import simulate
from hf_dcp.rates import Rates

FOLDER = Path(__file__).parent
BATCHES = FOLDER / "data" / "cluster_batches.json"
SHAPE = ModelShape(heads=8, kv_heads=2, head_dim=64, dtype="fp32")
MASKS = ("causal", "lambda:8,512", "blockwise:32,2,1,1", "shared:0.2x4")
CELL_S = 15.0
"""Rounds, at least 1 and at most 3, are as many as fit into about so many seconds."""


@dataclass(frozen=True)
class Cell:
    batch: str
    mask: str
    lengths: tuple[int, ...]


def main() -> int:
    options = parse()
    if "RANK" not in os.environ:
        return start_ranks(options)
    group = Group.join()
    try:
        run_cells(options, group)
    finally:
        group.leave()
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--per-node", type=int, default=1)
    parser.add_argument("--mbit", type=int, default=100, help="each node's link, both ways")
    parser.add_argument("--results", type=Path, required=True, help="JSON lines; cells are appended")
    parser.add_argument("--batches", type=Path, default=BATCHES)
    parser.add_argument("--only", default="/0", help="only batches whose name contains this")
    parser.add_argument("--masks", nargs="*", default=MASKS)
    parser.add_argument("--foreign", type=float, default=0.1, help="share of the CPUs that others may have had")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds after which no new cell begins")
    return parser.parse_args()


def start_ranks(options: argparse.Namespace) -> int:
    """Run this program on every rank of an emulated cluster."""
    cluster = [str(FOLDER / "netcluster"), *(str(n) for n in (options.nodes, options.per_node, options.mbit)), "--"]
    limit = str(int(options.budget + 120))
    return subprocess.run(
        [*cluster, sys.executable, *sys.argv], env={**os.environ, "TIMEOUT_S": limit}, check=False
    ).returncode


def run_cells(options: argparse.Namespace, group: Group) -> None:
    begin = time.monotonic()
    setting = {"nodes": options.nodes, "per_node": options.per_node, "mbit": options.mbit}
    missing = [Cell(*cell) for cell in group.gather(find_missing(options, setting) if group.rank == 0 else None)[0]]
    rates = Rates(**calibrate(CalibrationSettings(SHAPE, repeats=3), group)["rates"])
    measure_cell(Cell("warm-up", "causal", (64,)), rates, group)
    longest = 0.0
    for number, cell in enumerate(missing):
        now = time.monotonic() - begin
        if number and any(group.gather(now + longest > options.budget)):
            break
        say(group, f"{len(missing) - number} cells missing: {cell.batch}, {cell.mask}")
        result = measure_cell(cell, rates, group)
        longest = max(longest, time.monotonic() - begin - now)
        if group.rank == 0:
            with options.results.open("a") as file:
                file.write(json.dumps({**setting, **result}) + "\n")
            total = result["speedups"]["dense"]["total"]
            say(
                group,
                f"  {total['speedup']:.2f} x {total['best']}, ceiling {total['ceiling']:.2f}, {longest:.0f} s, "
                f"others {result['foreign_cpu']:.0%}",
            )


def say(group: Group, text: str) -> None:
    if group.rank == 0:
        print(text, file=sys.stderr, flush=True)


def find_missing(options: argparse.Namespace, setting: dict[str, Any]) -> list[list[Any]]:
    """Cells without a result first, then those that were measured while the machine did something else."""
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    tries: dict[tuple[str, str], list[float]] = {}
    for result in map(json.loads, lines):
        if setting.items() <= result.items():
            tries.setdefault((result["batch"], result["mask"]), []).append(result["foreign_cpu"])
    named = [(name, lengths) for name, lengths in read_batches(options.batches) if options.only in name]
    cells = [[name, mask, lengths] for name, lengths in named for mask in options.masks]
    left = [cell for cell in cells if min(tries.get((cell[0], cell[1]), [1.0])) > options.foreign]
    return sorted(left, key=lambda cell: len(tries.get((cell[0], cell[1]), [])))


def measure_cell(cell: Cell, rates: Rates, group: Group) -> dict[str, Any]:
    batch, config = with_mask(cell.lengths, cell.mask), DcpConfig(hardware=rates, epsilon="auto")
    predicted = predict(batch, config, group)
    names = choose(predicted, len(cell.lengths))
    contestants = make_contestants(names, batch, group, SHAPE, config, alone=True)
    for contestant in contestants:
        warm_up(contestant)
    foreign, wire = ForeignCpu(), wire_bytes()
    timings, turns = rounds(contestants, predicted, group)
    share = foreign.share(group)
    sent = sum(group.gather(wire_bytes() - wire))
    reports = {c.name: collect(c, timing, group) for c, timing in zip(contestants, timings, strict=True)}
    return {
        "commit": commit(),
        "rates": asdict(rates),
        "batch": cell.batch,
        "mask": cell.mask,
        "lengths": list(cell.lengths),
        "attended": attended(batch),
        "rounds": {name: counts[0] for name, counts in turns.items()},
        "foreign_cpu": share,
        "predicted_s": predicted,
        "plans": reports,
        "speedups": speedups(reports),
        "wire_bytes": sent,
        "wire_planned": planned_on_wire(reports, turns),
    }


def commit() -> str:
    """The commit of this code, empty outside of a repository."""
    command = ["git", "-C", str(FOLDER), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def rounds(
    contestants: list[Contestant], predicted: dict[str, float], group: Group
) -> tuple[list[Timings], dict[str, list[int]]]:
    """Rounds of all, more of dcp, which is short, then compute and exchange alone of dcp and the fastest dense scheme.

    Returns:
        timings, and for each contestant how many turns of the whole and of the exchange alone there were.
    """
    repeats = max(1, min(3, int(CELL_S / sum(predicted[c.name] for c in contestants))))
    more = max(1, min(3, int(CELL_S / (5 * predicted["dcp"]))))
    timings = measure(contestants, group, repeats, warmup=0, parts=(WHOLE,))
    turns = {c.name: [repeats, 0] for c in contestants}
    own = next(c for c in contestants if c.name == "dcp")
    seconds = {
        c.name: sum(min(timing.seconds[WHOLE, which]) for which in PASSES)
        for c, timing in zip(contestants, timings)
        if c.name in DENSE
    }
    slowest = {name: max(group.gather(value)) for name, value in seconds.items()}
    winner = next(c for c in contestants if c.name == min(slowest, key=slowest.__getitem__))
    for one, count, parts in ((own, more, None), (winner, 1, ("compute", "exchange"))):
        (further,) = measure([one], group, count, warmup=0, parts=parts)
        timings[contestants.index(one)].extend(further)
        turns[one.name][0] += count if parts is None else 0
        turns[one.name][1] += count
    return timings, turns


def predict(batch: BatchSpec, config: DcpConfig, group: Group) -> dict[str, float]:
    """Seconds of forward and backward of dcp and of all static schemes, each predicted by one rank. Collective."""
    mine = {}
    for name in ("dcp", *DENSE, *ROW_EXACT)[group.rank :: group.world_size]:
        plans = make_rank_plans(name, batch, group.topology, SHAPE, config)
        mine[name] = sum(simulate(plans, which, config.rates).total_s for which in PASSES)
    return {name: value for part in group.gather(mine) for name, value in part.items()}


def warm_up(contestant: Contestant) -> None:
    """Prepare all plans of a contestant, masks included, as its first call would."""
    for plan in (contestant.plan, *contestant.alone.values()):
        for which in PASSES:
            for calls in plan.executor.prepared(contestant.window, which).calls:
                for call in calls:
                    plan.executor.masks.get(call.mask)


def choose(predicted: dict[str, float], sequences: int) -> list[str]:
    dense, exact = (sorted(names, key=predicted.__getitem__) for names in (DENSE, ROW_EXACT))
    return list(dict.fromkeys(["dcp", *dense[:2], exact[0], *(["zigzag"] if sequences == 1 else [])]))


class ForeignCpu:
    """What other programs took of this machine's CPUs since this object was made."""

    def __init__(self) -> None:
        self.begin, self.own, self.busy = time.monotonic(), time.process_time(), self.busy_s()

    def share(self, group: Group) -> float:
        """Collective; 1: all CPUs, all the time. Interrupts don't count: they work for the network."""
        busy, seconds = self.busy_s() - self.busy, time.monotonic() - self.begin
        own = sum(group.gather(time.process_time() - self.own))
        shares = group.gather((busy - own) / seconds / (os.cpu_count() or 1))
        return round(max(shares[0], 0.0), 4)

    @staticmethod
    def busy_s() -> float:
        user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
        return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def wire_bytes() -> int:
    """Bytes that this node's interface has sent, counted by its first rank."""
    if os.environ["LOCAL_RANK"] != "0":
        return 0
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def planned_on_wire(reports: dict[str, Any], turns: dict[str, list[int]]) -> int:
    """Planned bytes between nodes of all turns: whole ones and those of the exchange alone."""
    each = {name: sum(report[which]["bytes_planned"]["inter"] for which in PASSES) for name, report in reports.items()}
    return sum(each[name] * sum(counts) for name, counts in turns.items())


if __name__ == "__main__":
    sys.exit(main())
