"""Features of stock Trainer, on N ranks with DCP against one process with stock attention and padding."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import EarlyStoppingCallback, EvalPrediction, PreTrainedModel, Trainer, TrainingArguments

import hf_dcp
from tests.integrations.families import EXACT, POSITIONS
from tests.integrations.small import IGNORE, random_lengths, rows, small_llama
from tests.integrations.test_trainer import build, flat, fresh
from tests.multiprocess import run_ranks

os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
DATA = rows(random_lengths(12))
EVALUATION = rows([20, 30, 11, 9, 25], seed=3)
BATCH = 2
COMMON: dict[str, Any] = {
    "use_cpu": True,
    "per_device_train_batch_size": BATCH,
    "per_device_eval_batch_size": BATCH,
    "gradient_accumulation_steps": 2,
    "train_sampling_strategy": "sequential",
    "max_steps": 3,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "optim_args": "momentum=0.9",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "remove_unused_columns": False,
}


def pad(features: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(row["length"] for row in features)

    def padded(values: list[int], fill: int) -> list[int]:
        return values + [fill] * (longest - len(values))

    return {
        "input_ids": torch.tensor([padded(row["input_ids"], 0) for row in features]),
        "labels": torch.tensor([padded(row["labels"], IGNORE) for row in features]),
        "attention_mask": torch.tensor([padded([1] * row["length"], 0) for row in features]),
    }


def trainer_of(
    dcp_size: int, make: Any = small_llama, extra: dict[str, Any] | None = None, **arguments: Any
) -> Trainer:
    """A Trainer with DCP, or for ``dcp_size`` 0 a stock one with padding and sdpa."""
    fresh()
    extra = extra or {}
    if dcp_size:
        return build(
            dcp_size, model=make("dcp"), data=DATA, evaluation=EVALUATION, batch=BATCH,
            callbacks=[hf_dcp.DcpStatsCallback(), *extra.pop("callbacks", [])], trainer_arguments=extra,
            **(COMMON | arguments),
        )  # fmt: skip
    args = TrainingArguments(**(COMMON | {"output_dir": tempfile.mkdtemp()} | arguments))
    options = {"train_dataset": DATA, "eval_dataset": EVALUATION, "data_collator": pad}
    return Trainer(make("sdpa"), args, **options, **extra)


def trained(trainer: Trainer) -> dict[str, Any]:
    trainer.train()
    logs = trainer.state.log_history
    return {
        "loss": [entry["loss"] for entry in logs if "loss" in entry],
        "eval": [entry["eval_loss"] for entry in logs if "eval_loss" in entry],
        "norm": [entry["grad_norm"] for entry in logs if "loss" in entry],
        "steps": trainer.state.global_step,
        "parameters": flat(trainer.model).tolist(),
    }


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """What users write: they shift labels themselves."""
    logits, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    kept = labels != IGNORE
    best = logits if logits.ndim == 2 else logits.argmax(-1)
    values = best if logits.ndim == 2 else np.take_along_axis(logits, np.maximum(labels, 0)[..., None], -1)[..., 0]
    right = float((best == labels)[kept].mean())
    return {"accuracy": right, "labels": int(kept.sum()), "score": float(values[kept].mean())}


def predicted(trainer: Trainer) -> dict[str, Any]:
    """Predictions and labels by row, and what compute_metrics makes of them."""
    found = trainer.predict(EVALUATION)
    return {
        "logits": [found.predictions[i, : row["length"]].ravel().tolist() for i, row in enumerate(EVALUATION)],
        "labels": np.asarray(found.label_ids).tolist(),
        "metrics": {
            k: v for k, v in found.metrics.items() if k.split("_")[1] in ("loss", "accuracy", "labels", "score")
        },
        "shape": list(found.predictions.shape[:2]),
    }


def best_model(dcp_size: int, folder: str) -> dict[str, Any]:
    """Evaluated at every step with a growing learning rate: the best is not the last, and training stops early."""
    trainer = trainer_of(
        dcp_size, output_dir=folder, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", learning_rate=3.0, max_steps=8,
        extra={"callbacks": [EarlyStoppingCallback(early_stopping_patience=2)]},
    )  # fmt: skip
    answer = trained(trainer)
    best = trainer.state.best_model_checkpoint
    return answer | {"best": Path(best or "none").name}


def argmax(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.argmax(-1)


def mixtral(attention: str) -> PreTrainedModel:
    return POSITIONS["router loss"].make(attention)


def longrope(attention: str) -> PreTrainedModel:
    return POSITIONS["longrope"].make(attention)


def gemma3(attention: str) -> PreTrainedModel:
    return EXACT["Gemma3 (local and global layers)"].make(attention)


def compiled(attention: str) -> PreTrainedModel:
    """Its forward in one graph for all plans, but for the stock one, which is not compiled."""
    model = small_llama(attention)
    if attention == "dcp":
        GRAPHS.clear()
        model.forward = torch.compile(model.forward, backend=count_graph, dynamic=True, fullgraph=True)
    return model


GRAPHS: list[int] = []


def count_graph(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """A backend that traces forward and backward, and runs them with the kernels of eager mode."""
    GRAPHS.append(len(inputs))
    return torch._dynamo.backends.registry.lookup_backend("aot_eager")(graph, inputs)


CHECKPOINTING: dict[str, Any] = {"gradient_checkpointing": True, "max_steps": 2}


def features(dcp_size: int, folder: str) -> dict[str, Any]:
    each_step: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    metrics = {"compute_metrics": accuracy}
    return {
        "label smoothing": trained(trainer_of(dcp_size, label_smoothing_factor=0.2, **each_step)),
        "router loss": trained(trainer_of(dcp_size, mixtral, **each_step)),
        "longrope": trained(trainer_of(dcp_size, longrope, **each_step)),
        "local layers": trained(trainer_of(dcp_size, gemma3, **each_step)),
        "reentrant": trained(
            trainer_of(dcp_size, gradient_checkpointing_kwargs={"use_reentrant": True}, **CHECKPOINTING)
        ),
        "not reentrant": trained(
            trainer_of(dcp_size, gradient_checkpointing_kwargs={"use_reentrant": False}, **CHECKPOINTING)
        ),
        "best model": best_model(dcp_size, folder),
        "bf16": trained(trainer_of(dcp_size, bf16=True)),
        "compiled": trained(trainer_of(dcp_size, compiled)) | {"graphs": len(GRAPHS)},
        "predict": predicted(trainer_of(dcp_size, extra=dict(metrics))),
        "preprocessed": predicted(trainer_of(dcp_size, extra=metrics | {"preprocess_logits_for_metrics": argmax})),
        "in batches": trainer_of(dcp_size, extra={"compute_metrics": Batchwise()}, batch_eval_metrics=True).evaluate(),
    }


class Batchwise:
    """Metrics that add up batches."""

    def __init__(self) -> None:
        self.right, self.labels = 0.0, 0

    def __call__(self, prediction: EvalPrediction, compute_result: bool) -> dict[str, float]:
        logits, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
        kept = labels != IGNORE
        self.right += float((logits.argmax(-1) == labels)[kept].sum())
        self.labels += int(kept.sum())
        return {"accuracy": self.right / self.labels, "labels": self.labels} if compute_result else {}


def on_ranks(dp: int) -> dict[str, Any]:
    folder = os.environ["FEATURES_FOLDER"]
    world = dist.get_world_size()
    if dp == 1:
        return features(world, folder)
    each_step: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    size = world // dp
    return {
        "label smoothing": trained(
            trainer_of(size, label_smoothing_factor=0.2, gradient_accumulation_steps=1, **each_step)
        ),
        "predict": predicted(trainer_of(size, extra={"compute_metrics": accuracy})),
    }


@pytest.fixture(scope="module")
def stock() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        answer = features(0, folder)
    # What bf16 costs a single process: DCP may cost as much, not more.
    answer["fp32"] = trained(trainer_of(0))
    fresh()
    return answer


def run(world: int, dp: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FEATURES_FOLDER"] = folder
        return run_ranks(on_ranks, world, dp, timeout=400)


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, Any]:
    first, second = run(2, 1)
    for name in ("predict", "preprocessed"):
        assert first[name] == second[name]
    return first


@pytest.fixture(scope="module")
def four_ranks() -> dict[str, Any]:
    return run(4, 1)[0]


@pytest.fixture(scope="module")
def two_groups() -> dict[str, Any]:
    return run(4, 2)[-1]


TRAINED = [
    "compiled",
    "label smoothing",
    "router loss",
    "longrope",
    "local layers",
    "reentrant",
    "not reentrant",
    "best model",
]
ALL_TRAINED = {"label smoothing", "router loss", "longrope", "local layers"}


def check_trained(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["steps"] == want["steps"]
    assert got["loss"] == pytest.approx(want["loss"], abs=1e-5)
    assert got["eval"] == pytest.approx(want["eval"], abs=1e-5)
    assert got["norm"] == pytest.approx(want["norm"], rel=1e-4)
    assert np.abs(np.array(got["parameters"]) - np.array(want["parameters"])).max() <= 1e-6


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", TRAINED)
def test_training_equals_stock(name: str, two_ranks: dict[str, Any], stock: dict[str, Any]) -> None:
    check_trained(two_ranks[name], stock[name])
    if name in ALL_TRAINED:
        assert len(stock[name]["eval"]) == 2


def test_one_graph_for_all_plans(two_ranks: dict[str, Any]) -> None:
    """Six batches with as many plans; a second graph may come when a size turns out to change."""
    assert two_ranks["compiled"]["steps"] == 3
    assert 1 <= two_ranks["compiled"]["graphs"] <= 2


def test_the_best_model_is_chosen_and_training_stops_early(two_ranks: dict[str, Any], stock: dict[str, Any]) -> None:
    got, want = two_ranks["best model"], stock["best model"]
    assert got["best"] == want["best"] != f"checkpoint-{want['steps']}"
    assert want["steps"] < 8


def test_bf16_costs_no_more_than_in_one_process(two_ranks: dict[str, Any], stock: dict[str, Any]) -> None:
    exact = np.array(stock["fp32"]["parameters"])
    got, want = (np.abs(np.array(run["bf16"]["parameters"]) - exact).max() for run in (two_ranks, stock))
    assert 0 < got <= 2 * want
    assert two_ranks["bf16"]["loss"] == pytest.approx(stock["bf16"]["loss"], rel=2e-2)


def check_predictions(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["shape"] == want["shape"] and len(got["logits"]) == len(EVALUATION)
    for ours, theirs in zip(got["logits"], want["logits"]):
        assert np.abs(np.array(ours) - np.array(theirs)).max() <= 1e-5
    # The first token of a row is nobody's label; DCP has none for it.
    ours, theirs = np.array(got["labels"]), np.array(want["labels"])
    assert (ours[:, 1:] == theirs[:, 1:]).all() and (ours[:, 0] == IGNORE).all()
    assert got["metrics"] == pytest.approx(want["metrics"], abs=1e-5)


@pytest.mark.parametrize("name", ["predict", "preprocessed"])
def test_predictions_are_those_of_stock_in_the_order_of_the_data(
    name: str, two_ranks: dict[str, Any], stock: dict[str, Any]
) -> None:
    check_predictions(two_ranks[name], stock[name])


def test_metrics_of_batches_equal_stock(two_ranks: dict[str, Any], stock: dict[str, Any]) -> None:
    for name in ("eval_loss", "eval_accuracy", "eval_labels"):
        assert two_ranks["in batches"][name] == pytest.approx(stock["in batches"][name], abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TRAINED)
def test_training_on_four_ranks_equals_stock(name: str, four_ranks: dict[str, Any], stock: dict[str, Any]) -> None:
    check_trained(four_ranks[name], stock[name])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_groups_equal_stock(two_groups: dict[str, Any], stock: dict[str, Any]) -> None:
    """Two groups, each with a batch, without accumulation, make the steps of one process with accumulation 2."""
    got, want = two_groups["label smoothing"], stock["label smoothing"]
    assert got["loss"] == pytest.approx(want["loss"], abs=1e-5)
    assert np.abs(np.array(got["parameters"]) - np.array(want["parameters"])).max() <= 1e-6
    ours, theirs = two_groups["predict"], stock["predict"]
    check_predictions(ours | {"metrics": {}}, theirs | {"metrics": {}})
    assert ours["metrics"]["test_accuracy"] == theirs["metrics"]["test_accuracy"]
