"""Stock Trainer on N ranks against one process: steps, resume, evaluation, refusals."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor
from transformers import Trainer, TrainingArguments

import hf_dcp
from hf_dcp.lookahead import planning
from hf_dcp.planning.planner import plan_batch
from tests.integrations.small import IGNORE, random_lengths, rows, small_llama
from tests.multiprocess import run_ranks
from tests.runtime.placements import random_placement

os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
LENGTHS = random_lengths(26)
EVALUATION = [20, 30, 11, 9, 25]


def build(
    dcp_size: int,
    model: torch.nn.Module | None = None,
    data: Any = None,
    evaluation: Any = None,
    batch: int = 1,
    mask: Any = "causal",
    callbacks: list | None = None,
    trainer_arguments: dict[str, Any] | None = None,
    **arguments: Any,
) -> Trainer:
    """A Trainer on the small Llama; ``data`` None: batches of up to 100 tokens."""
    plugin = hf_dcp.DcpParallelismConfig(dcp_size=dcp_size, dcp=hf_dcp.DcpConfig(block_size=8))
    defaults = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "parallelism_config": plugin,
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": batch,
        "gradient_accumulation_steps": 2,
        "train_sampling_strategy": "sequential",
        "max_steps": 6,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "optim_args": "momentum=0.9",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "include_num_input_tokens_seen": "all",
        "remove_unused_columns": False,
    }
    args = TrainingArguments(**(defaults | arguments))
    if data is None:
        # Groups of two, also where there is one: the same batches for every number of groups.
        data = plugin.batched(rows(LENGTHS), tokens_per_batch=100, multiple_of=2)
    return Trainer(
        model or small_llama(),
        args,
        train_dataset=data,
        eval_dataset=evaluation,
        callbacks=[hf_dcp.DcpStatsCallback()] if callbacks is None else callbacks,
        **({"data_collator": plugin.collator(mask=mask)} | (trainer_arguments or {})),
    )


def fresh() -> None:
    """Forget Accelerate's state, as a new program would have none; the process group stays."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._reset_state()


def flat(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def summary(trainer: Trainer) -> dict[str, Any]:
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "loss": [entry["loss"] for entry in logs],
        "norm": [entry["grad_norm"] for entry in logs],
        "tokens": trainer.state.num_input_tokens_seen,
        "dcp_tokens": sum(entry["dcp/tokens"] for entry in logs),
        "epoch": trainer.state.epoch,
        "steps": trainer.state.global_step,
        "total_batch": trainer.get_total_train_batch_size(trainer.args),
        "parameters": flat(trainer.model).tolist(),
    }


def train(dcp_size: int, **options: Any) -> dict[str, Any]:
    fresh()
    trainer = build(dcp_size, **options)
    trainer.train()
    return summary(trainer)


def train_with_empty_ranks(dcp_size: int) -> dict[str, Any]:
    """An epoch of single rows, whose tokens are all on the first rank; tiles are computed anywhere."""
    planning.plan_batch = functools.partial(plan_batch, solver=random_placement(0, owners=1))
    data = rows([5, 7, 16, 8, 25, 7, 6, 18, 5, 7, 6, 8])
    answer = train(dcp_size, data=data, max_steps=-1, num_train_epochs=1, gradient_accumulation_steps=1)
    planning.plan_batch = plan_batch
    return answer


def stop_and_resume(dcp_size: int, folder: str) -> dict[str, Any]:
    """Train 3 of 6 steps, save, and go on in a new Trainer."""
    fresh()
    options = {
        "output_dir": folder,
        "save_strategy": "steps",
        "save_steps": 3,
        "optim": "adamw_torch",
        "optim_args": None,
    }
    build(dcp_size, **(options | {"max_steps": 3})).train()
    if dist.is_initialized():
        dist.barrier()
    fresh()
    trainer = build(dcp_size, **options)
    trainer.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-3"))
    return summary(trainer)


def evaluate(dcp_size: int) -> dict[str, float]:
    """Losses of one batch at a time, of rows by the stock sampler, and of a shard without any label."""
    data = rows(EVALUATION)
    unlabelled = [data[0] | {"labels": [IGNORE] * (EVALUATION[0] - 1) + data[0]["input_ids"][-1:]}]
    answers = {}
    for name, evaluation, batch in (
        ("batched", hf_dcp.DcpParallelismConfig().batched(data, tokens_per_batch=40, multiple_of=2), 1),
        ("rows", data, 2),
        ("even rows", data[:4], 2),
        ("one label", unlabelled, 1),
    ):
        fresh()
        trainer = build(dcp_size, data=data if name != "batched" else None, evaluation=evaluation, batch=batch)
        answers[name] = trainer.evaluate()["eval_loss"]
    return answers


def everything(dcp_size: int, folder: str) -> dict[str, Any]:
    multiprocessing.current_process()._config["daemon"] = False  # it is to have data loader workers
    adamw = {"optim": "adamw_torch", "optim_args": None}
    answer = {
        "sgd": train(dcp_size),
        "adamw": train(dcp_size, **adamw),
        "resumed": stop_and_resume(dcp_size, folder),
        "empty ranks": train_with_empty_ranks(dcp_size),
        "checkpointing": train(dcp_size, gradient_checkpointing=True, max_steps=2),
        "workers": train(dcp_size, dataloader_num_workers=2, max_steps=2),
        "evaluation": evaluate(dcp_size),
    }
    return json.loads(json.dumps(answer))


@pytest.fixture(scope="module")
def one_process() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        answer = everything(1, folder)
    fresh()
    return answer


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_training_equals_one_process(world: int, one_process: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(everything, world, world, folder, timeout=500)
    for answer in results:
        _compare(answer, one_process)
        for name in ("batched", "rows", "even rows", "one label"):
            assert answer["evaluation"][name] == pytest.approx(one_process["evaluation"][name], abs=2e-6), name


def _compare(answer: dict[str, Any], reference: dict[str, Any]) -> None:
    for name, tolerance in (
        ("sgd", 1e-7),
        ("adamw", 1e-5),
        ("resumed", 1e-5),
        ("empty ranks", 1e-7),
        ("checkpointing", 1e-7),
        ("workers", 1e-7),
    ):
        _compare_runs(name, tolerance, answer[name], reference[name])
    # Stopped and resumed: not even a last bit differs.
    assert answer["resumed"]["parameters"] == answer["adamw"]["parameters"]
    assert answer["resumed"]["tokens"] == answer["adamw"]["tokens"]


def _compare_runs(name: str, tolerance: float, got: dict[str, Any], want: dict[str, Any]) -> None:
    assert _distance(got, want) <= tolerance, f"{name}: {_distance(got, want)}"
    assert got["loss"] == pytest.approx(want["loss"], abs=1e-5), name
    assert got["norm"] == pytest.approx(want["norm"], rel=1e-5), name
    for count in ("tokens", "epoch", "steps", "total_batch", "dcp_tokens"):
        assert got[count] == want[count], (name, count)


def _distance(got: dict[str, Any], want: dict[str, Any]) -> float:
    return float((torch.tensor(got["parameters"]) - torch.tensor(want["parameters"])).abs().max())


def on_four_ranks() -> dict[str, Any]:
    return {
        "sgd": train(2, gradient_accumulation_steps=1),
        "evaluation": evaluate(2),
        "one group": {"sgd": train(4), "adamw": train(4, optim="adamw_torch", optim_args=None)},
    }


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Any]]:
    return run_ranks(on_four_ranks, 4, timeout=280)


def test_one_group_of_four_equals_one_process(four_ranks: list[dict[str, Any]], one_process: dict[str, Any]) -> None:
    for answer in four_ranks:
        for name, tolerance in (("sgd", 1e-7), ("adamw", 1e-5)):
            _compare_runs(name, tolerance, answer["one group"][name], one_process[name])


def test_two_groups_of_two_equal_one_process(four_ranks: list[dict[str, Any]], one_process: dict[str, Any]) -> None:
    """Two groups with a batch each, at one batch per step, are one process with two batches per step."""
    for answer in four_ranks:
        got, want = answer["sgd"], one_process["sgd"]
        assert _distance(got, want) <= 1e-7
        assert got["loss"] == pytest.approx(want["loss"], abs=1e-5)
        assert (got["tokens"], got["total_batch"], got["epoch"]) == (want["tokens"], want["total_batch"], want["epoch"])
        assert got["dcp_tokens"] == want["dcp_tokens"]
        # Where rows don't fill the last batch of every group, stock data parallel evaluation repeats some of them.
        for name in ("batched", "even rows"):
            assert answer["evaluation"][name] == pytest.approx(one_process["evaluation"][name], abs=2e-6), name


def test_one_process_with_dcp_equals_stock(one_process: dict[str, Any]) -> None:
    """The reference of the other tests itself: stock Trainer, sdpa, and a collator that pads."""
    fresh()
    batches = hf_dcp.DcpParallelismConfig().batched(rows(LENGTHS), tokens_per_batch=100, multiple_of=2)
    args = TrainingArguments(
        tempfile.mkdtemp(), use_cpu=True, per_device_train_batch_size=1, gradient_accumulation_steps=2,
        train_sampling_strategy="sequential", max_steps=6, learning_rate=1e-2, lr_scheduler_type="constant",
        optim="sgd", optim_args="momentum=0.9", logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(small_llama("sdpa"), args, train_dataset=batches, data_collator=pad)
    trainer.train()
    distance = (flat(trainer.model) - torch.tensor(one_process["sgd"]["parameters"])).abs().max()
    assert float(distance) <= 1e-7
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == pytest.approx(one_process["sgd"]["loss"], abs=1e-5)


def pad(features: list[list[dict[str, Any]]]) -> dict[str, Tensor]:
    (batch,) = features
    longest = max(len(row["input_ids"]) for row in batch)

    def padded(values: list[int], fill: int) -> list[int]:
        return values + [fill] * (longest - len(values))

    return {
        "input_ids": torch.tensor([padded(row["input_ids"], 0) for row in batch]),
        "labels": torch.tensor([padded(row["labels"], IGNORE) for row in batch]),
        "attention_mask": torch.tensor([padded([1] * len(row["input_ids"]), 0) for row in batch]),
    }
