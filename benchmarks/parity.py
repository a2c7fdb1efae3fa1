"""Loss curves of DCP on four processes against one process with dense masks and no DCP: same data, model and seed.

    python benchmarks/parity.py run [--mask causal] [--processes 4] [--steps 300]
    python benchmarks/parity.py plot docs/images/parity.png

`run` trains what is not yet in the results file (all masks, four processes and one) with `recipes/sft.py`, one run after
the other; each takes some minutes on two cores. `plot` draws the curves and prints the largest differences.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "data" / "parity.json"
MASKS = ("causal", "lambda:16,128", "blockwise:64,2,1,1", "shared:0.2x4")
PROCESSES = (4, 1)


@dataclass(frozen=True)
class Run:
    """One training: with one process, dense masks and torch's attention; with more, DCP."""

    mask: str
    processes: int
    steps: int = 300
    max_length: int = 512
    tokens_per_batch: int = 1024

    def command(self, output_dir: str) -> list[str]:
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "recipes/cpu_4.yaml"]
        launch += ["--num_processes", str(self.processes), "recipes/sft.py", "--json", "--output_dir", output_dir]
        for name, value in asdict(self).items():
            if name != "processes":
                launch += [f"--{name}" if name != "steps" else "--max_steps", str(value)]
        return launch + ["--attention", "dcp" if self.processes > 1 else "sdpa"]

    def losses(self) -> list[float]:
        """Train: the loss of every step. Raises CalledProcessError if the training fails."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(self.command(folder), cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE)
        return json.loads(done.stdout)["losses"]


def read_results(file: Path) -> list[dict]:
    return json.loads(file.read_text("utf-8")) if file.exists() else []


def run_missing(runs: list[Run], file: Path) -> None:
    """Train what ``file`` lacks, and add it there."""
    for run in runs:
        results = read_results(file)
        if any(entry["run"] == asdict(run) for entry in results):
            continue
        print(f"training {run}", file=sys.stderr, flush=True)
        entry = {"run": asdict(run), "losses": run.losses()}
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(json.dumps(e) for e in [*results, entry])
        file.write_text(f"[\n{lines}\n]\n", "utf-8")


def pairs(results: list[dict]) -> dict[str, tuple[list[float], list[float]]]:
    """Mask -> losses of (DCP, one process), of the masks that have both."""
    found: dict[str, dict[bool, list[float]]] = {}
    for entry in results:
        found.setdefault(entry["run"]["mask"], {})[entry["run"]["processes"] > 1] = entry["losses"]
    return {mask: (both[True], both[False]) for mask, both in found.items() if len(both) == 2}


def differences(dcp: list[float], one: list[float]) -> list[float]:
    """Of every step. Raises ValueError if the runs have different numbers of steps."""
    return [abs(a - b) for a, b in zip(dcp, one, strict=True)]


def table(results: list[dict]) -> str:
    """The largest differences, as a Markdown table."""
    lines = ["| mask | first loss | last loss, DCP | last loss, one process | largest difference | in step |"]
    lines.append("|---|---|---|---|---|---|")
    for mask, (dcp, one) in pairs(results).items():
        apart = differences(dcp, one)
        worst = max(range(len(apart)), key=apart.__getitem__)
        lines.append(f"| `{mask}` | {one[0]:.4f} | {dcp[-1]:.5f} | {one[-1]:.5f} | {apart[worst]:.1e} | {worst + 1} |")
    return "\n".join(lines)


def draw(results: list[dict], file: Path) -> None:
    """Curves of both runs of every mask above each other, and their differences below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
    figure, (curves, apart) = plt.subplots(2, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 2))
    for colour, (mask, (dcp, one)) in zip(colours, pairs(results).items()):
        steps = range(1, len(dcp) + 1)
        curves.plot(steps, one, color=colour, linewidth=3.5, alpha=0.35)
        curves.plot(steps, dcp, color=colour, linewidth=1, label=mask)
        apart.semilogy(steps, [max(d, 1e-8) for d in differences(dcp, one)], color=colour, linewidth=0.8)
    curves.set_ylabel("training loss")
    curves.set_title("DCP on four processes (thin) over one process with dense masks (wide)")
    curves.legend(frameon=False)
    apart.set_ylabel("absolute difference")
    apart.set_xlabel("step")
    for axis in (curves, apart):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120, bbox_inches="tight")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON file")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--mask", action="append", help="default: four masks")
    run.add_argument("--processes", type=int, action="append", help="default: 4, then 1")
    run.add_argument("--steps", type=int, default=Run.steps)
    plot = commands.add_parser("plot")
    plot.add_argument("file", type=Path)
    arguments = parser.parse_args(argv)
    if arguments.command == "run":
        masks, processes = arguments.mask or MASKS, arguments.processes or PROCESSES
        run_missing([Run(mask, n, arguments.steps) for mask in masks for n in processes], arguments.results)
    else:
        results = read_results(arguments.results)
        draw(results, arguments.file)
        print(table(results))


if __name__ == "__main__":
    main()
