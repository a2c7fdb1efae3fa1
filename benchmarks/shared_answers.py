"""DPO with stock TRL against the same with DCP: tokens that the model computes, and seconds per step.

    python benchmarks/shared_answers.py [--processes 1] [--wordnet FOLDER] [--steps 6]

For words and their senses (WordNet), and for long functions and their one-line descriptions, each with two and with four
ranked answers: the small Llama of the recipes, fp32, CPU, one thread per process, the same pairs in the same order in both.
Stock TRL divides the pairs of a step among its processes; DCP's processes are one group. CPU seconds are those of the
first process. Prints one JSON line for each.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

import models
from data import questions
from data.text import standard_library_tokenizer
from datasets import Dataset, disable_progress_bars
from transformers import TrainerCallback, set_seed
from trl import DPOConfig, DPOTrainer

import hf_dcp
from hf_dcp.data.answers import ranked_pairs
from hf_dcp.runtime.processes import run_processes

FIGURES = ("tokens", "seconds", "cpu_seconds")
SKIPPED = 2  # steps that compile the planner and fill caches
QUESTIONS_PER_STEP = {"words": 8, "functions": 4}


class Clock(TrainerCallback):
    """Seconds, and CPU seconds of this process, at the end of every step."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.times.append((time.perf_counter(), time.process_time()))

    def per_step(self) -> tuple[float, float]:
        steps = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(self.times, self.times[1:])][SKIPPED - 1 :]
        return statistics.median(s for s, _ in steps), statistics.median(c for _, c in steps)


def data_of(kind: str, answers: int, wordnet: Path, work_dir: Path, steps: int) -> Dataset:
    rows = questions.wordnet(wordnet) if kind == "words" else questions.functions(work_dir, longest=9000, least=1500)
    chosen = rows.select(range(QUESTIONS_PER_STEP[kind] * steps))
    return Dataset.from_list(ranked_pairs([{**row, "answers": row["answers"][:answers]} for row in chosen]))


def measure(kind: str, answers: int, dcp: bool, steps: int, wordnet: str, work_dir: str) -> dict[str, Any]:
    """One run, in each of its processes."""
    disable_progress_bars()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    set_seed(0)
    tokenizer = standard_library_tokenizer(Path(work_dir))
    data = data_of(kind, answers, Path(wordnet), Path(work_dir), steps)
    model = models.tiny_llama(tokenizer, 16384, "dcp" if dcp else "sdpa")
    pairs = answers * (answers - 1) // 2 * QUESTIONS_PER_STEP[kind]
    plugin = hf_dcp.DcpParallelismConfig(dcp_size=world) if dcp else None
    clock = Clock()
    args = DPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=pairs if dcp else pairs // world,
        train_sampling_strategy="sequential",
        max_steps=steps,
        max_length=None,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        learning_rate=1e-4,
        parallelism_config=plugin,
    )
    extra: dict[str, Any] = {"callbacks": [clock]}
    if plugin is not None:
        extra = {
            "callbacks": [clock, hf_dcp.DcpStatsCallback()],
            "data_collator": plugin.preference_collator(tokenizer),
        }
    trainer = DPOTrainer(model, copy.deepcopy(model), args, train_dataset=data, processing_class=tokenizer, **extra)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    seconds, cpu = clock.per_step()
    tokens = logs[-1]["num_tokens"] / len(logs)
    return {
        "tokens": statistics.mean(entry["dcp/tokens"] for entry in logs) if dcp else tokens,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "loss": [entry["loss"] for entry in logs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--wordnet", default=str(questions.WORDNET))
    parser.add_argument("--work_dir", default="runs/data")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--kinds", nargs="+", default=list(QUESTIONS_PER_STEP), choices=list(QUESTIONS_PER_STEP))
    given = parser.parse_args()
    for kind in given.kinds:
        for answers in (2, 4):
            arguments = (given.steps, given.wordnet, given.work_dir)
            stock, dcp = (
                run_processes(measure, given.processes, kind, answers, way, *arguments, timeout=600.0)[0]
                for way in (False, True)
            )
            line = {
                "data": kind,
                "answers": answers,
                "processes": given.processes,
                "stock": {name: stock[name] for name in FIGURES},
                "dcp": {name: dcp[name] for name in FIGURES},
                "token_saving": stock["tokens"] / dcp["tokens"],
                "cpu_saving": stock["cpu_seconds"] / dcp["cpu_seconds"],
                "time_saving": stock["seconds"] / dcp["seconds"],
                "largest_loss_difference": max(abs(a - b) for a, b in zip(stock["loss"], dcp["loss"])),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
