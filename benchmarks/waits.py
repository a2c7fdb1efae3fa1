"""How long do steps of the recipe wait for their batches: with and without planning ahead, and with a slow planner?

    python benchmarks/waits.py --only ahead
    python benchmarks/waits.py --only none
    python benchmarks/waits.py --only "slow planner, ahead"
    python benchmarks/waits.py --only "slow planner, none" --plot docs/images/waits.png

Each call trains with recipes/sft.py on 4 ranks (give it the machine alone), and keeps what it measured in --results; the figure
shows all that is there. Times are those of the rank that waited longest. The texts are pieces of Python's standard library of
different lengths, so that no two batches are alike and every one is planned.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOOKAHEAD = 4
AHEAD = ["--dataloader_num_workers", "2", "--lookahead", str(LOOKAHEAD)]
NONE = ["--dataloader_num_workers", "0"]
CASES: dict[str, tuple[list[str], list[str]]] = {
    "ahead": (["recipes/sft.py"], AHEAD),
    "none": (["recipes/sft.py"], NONE),
    "slow planner, ahead": (["benchmarks/slow_sft.py", "0.3"], AHEAD),
    "slow planner, none": (["benchmarks/slow_sft.py", "0.3"], NONE),
}


def write_texts(file: Path, count: int = 600) -> None:
    """Lines of JSON with texts of 500 to 6,000 characters, roughly 150 to 2,000 tokens."""
    choose = random.Random(0)
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    whole = "".join(source.read_text(errors="replace") for source in sources)
    with file.open("w") as out:
        for _ in range(count):
            start, length = choose.randrange(len(whole) - 6000), choose.randint(500, 6000)
            out.write(json.dumps({"text": whole[start : start + length]}) + "\n")


def run(case: str, steps: int, tokens: int) -> dict[str, Any]:
    program, options = CASES[case]
    (ROOT / "runs").mkdir(exist_ok=True)
    texts = ROOT / "runs" / "waits_texts.jsonl"
    write_texts(texts)
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        "--config_file",
        "recipes/cpu_4.yaml",
    ]
    sizes = ["--max_steps", str(steps), "--max_length", str(tokens), "--tokens_per_batch", str(tokens)]
    sizes += ["--dataset", str(texts)]
    command = [*launch, *program, *sizes, *options, "--output_dir", "runs/waits", "--disable_tqdm", "1", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(done.returncode)
    summary = json.loads(done.stdout)
    return {"waits_s": summary["waits_s"], "periods_s": summary["periods_s"], "statistics": summary["statistics"]}


def summarise(result: dict[str, Any]) -> dict[str, float]:
    """Of the steps after the first κ + 1, which the start of the workers delays."""
    waits, periods = result["waits_s"][LOOKAHEAD + 1 :], result["periods_s"][LOOKAHEAD + 1 :]
    return {
        "steps": len(waits),
        "step_s": statistics.median(periods),
        "wait_s_median": statistics.median(waits),
        "wait_s_most": max(waits),
        "wait_share": sum(waits) / sum(periods),
        "wait_share_most": max(wait / period for wait, period in zip(waits, periods)),
        "plan_cpu_s": result["statistics"]["plan_s"],
        "cached": result["statistics"]["plans_cached"],
        "replanned": result["statistics"]["plans_replanned"],
    }


def plot(results: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(results), figsize=(3.2 * len(results), 2.8), sharey=True, squeeze=False, constrained_layout=True
    )
    for axis, (case, result) in zip(axes[0], results.items()):
        steps = range(1, len(result["waits_s"]) + 1)
        axis.bar(steps, result["periods_s"], color="0.85", label="step")
        axis.bar(steps, result["waits_s"], color="tab:red", label="waiting for the batch")
        axis.axvspan(0.5, LOOKAHEAD + 1.5, color="tab:blue", alpha=0.08)
        axis.set_yscale("log")
        axis.set_title(f"{case}: {summarise(result)['wait_share']:.2%} waiting", fontsize=9)
        axis.set_xlabel("step", fontsize=8)
    axes[0, 0].set_ylabel("seconds")
    axes[0, 0].legend(fontsize=7)
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=CASES, help="one case; default: all")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "waits.json")
    parser.add_argument("--plot", type=Path, help="file for the figure")
    options = parser.parse_args()
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    for case in [options.only] if options.only else CASES:
        results[case] = run(case, options.steps, options.tokens)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(results))
    results = {case: results[case] for case in CASES if case in results}
    if options.plot:
        plot(results, options.plot)
    print(json.dumps({case: summarise(result) for case, result in results.items()}, indent=1))


if __name__ == "__main__":
    main()
