"""What the ranks of the tests of Trainer's features do: train, evaluate and predict, with DCP or as a stock Trainer."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import EarlyStoppingCallback, EvalPrediction, PreTrainedModel, Trainer, TrainingArguments

import hf_dcp
from tests.integrations.families import EXACT, POSITIONS
from tests.integrations.small import IGNORE, random_lengths, rows, small_llama
from tests.integrations.test_trainer import build, flat, fresh

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
        load_best_model_at_end=True, metric_for_best_model="eval_loss", learning_rate=2.2, max_steps=8,
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
