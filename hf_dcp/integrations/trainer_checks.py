"""Settings of Trainer that DCP can't honour, refused when the Trainer is built."""

from __future__ import annotations

import sys
from typing import Any

from transformers import Trainer, TrainingArguments

from hf_dcp.data.batched import BatchedDataset
from hf_dcp.data.collator import DcpCollator
from hf_dcp.integrations.accelerate import DcpParallelismConfig
from hf_dcp.integrations.trl_checks import check_trl, refuse_trainer


def calling_trainer() -> Trainer | None:
    """The Trainer that runs the callback that calls this: callbacks are not given it, but its frame is on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        trainer = frame.f_locals.get("self")
        if isinstance(trainer, Trainer):
            return trainer
        frame = frame.f_back  # type: ignore[assignment]
    return None


def plugin_of(args: TrainingArguments) -> DcpParallelismConfig:
    """The plugin of a Trainer. Raises ValueError if it has none."""
    plugin = args.parallelism_config
    if not isinstance(plugin, DcpParallelismConfig):
        raise ValueError(
            "DcpStatsCallback needs TrainingArguments(parallelism_config=hf_dcp.DcpParallelismConfig(...))"
        )
    return plugin


def check_arguments(args: TrainingArguments, train: Any = None, evaluation: Any = None) -> None:
    """Raise ValueError for training arguments that DCP can't honour.

    Args:
        train, evaluation: data sets; an evaluation set may be a dict of several.
    """
    for name, refused, instead in _rules(args):
        if refused:
            raise ValueError(f"{name}={getattr(args, name)!r} can't be honoured by DCP: {instead}")
    for kind, dataset in (("train", train), ("eval", evaluation)):
        name = f"per_device_{kind}_batch_size"
        if any(isinstance(part, BatchedDataset) for part in _values(dataset)) and getattr(args, name) != 1:
            raise ValueError(
                f"{name}={getattr(args, name)} with dcp.batched(...), whose items are whole batches: set {name}=1, and the "
                "size of a batch by tokens_per_batch"
            )


def _rules(args: TrainingArguments) -> list[tuple[str, bool, str]]:
    """(name of the argument, whether its value is refused, what to write instead)."""
    accelerator = args.accelerator_config
    return [
        (
            "train_sampling_strategy",
            args.train_sampling_strategy != "sequential",
            'set train_sampling_strategy="sequential"; dcp.batched(...) shuffles by seed and epoch itself',
        ),
        (
            "average_tokens_across_devices",
            not args.average_tokens_across_devices,
            "the loss of a rank is its part of a common sum; leave it at True",
        ),
        (
            "neftune_noise_alpha",
            args.neftune_noise_alpha is not None,
            "each rank would draw other noise, of a size that depends on how many tokens it has; leave it out",
        ),
        (
            "torch_compile",
            args.torch_compile,
            "the graph would be made anew for every plan; leave it out, and say "
            "model.forward = torch.compile(model.forward, dynamic=True) before the Trainer is built",
        ),
        ("use_liger_kernel", args.use_liger_kernel, "its loss was not tested with cut sequences; leave it out"),
        ("auto_find_batch_size", args.auto_find_batch_size, "lower tokens_per_batch instead"),
        ("deepspeed", bool(args.deepspeed), "use DDP or FSDP"),
        ("n_gpu", args.n_gpu > 1, "start one process per GPU, with accelerate launch or torchrun"),
        (
            "accelerator_config",
            bool(accelerator.split_batches or accelerator.dispatch_batches),
            "leave split_batches and dispatch_batches out; every rank cuts its own part out of its group's batch",
        ),
    ]


def check_trainer(trainer: Trainer) -> None:
    """Raise ValueError for a Trainer that would not train, or not evaluate, what one process does."""
    args = trainer.args
    refuse_trainer(type(trainer))
    if not isinstance(trainer.data_collator, DcpCollator):
        raise ValueError(
            f"data_collator is {type(trainer.data_collator).__name__}, which doesn't plan: pass "
            "data_collator=dcp.collator(tokenizer, mask=...) of the DcpParallelismConfig"
        )
    if trainer.data_collator.session is not plugin_of(args).session:
        raise ValueError("data_collator and parallelism_config are of different DcpParallelismConfig objects: use one")
    check_trl(trainer)
    check_arguments(args, trainer.train_dataset, trainer.eval_dataset)
    _check_functions(trainer)
    _check_lengths(trainer)


def _check_functions(trainer: Trainer) -> None:
    batched = any(isinstance(dataset, BatchedDataset) for dataset in _values(trainer.eval_dataset))
    if trainer.compute_metrics is not None and batched:
        raise ValueError(
            "compute_metrics would get the predictions of whole batches, in no order of the data set: give the rows "
            "themselves as eval_dataset, not dcp.batched(...), or leave it out (eval_loss is exact)"
        )
    args = trainer.args
    if args.batch_eval_metrics and "inputs" in args.include_for_metrics:
        raise ValueError(
            "batch_eval_metrics would get the inputs of a rank's part: leave them out of include_for_metrics"
        )
    if trainer.compute_loss_func is not None:
        raise ValueError("compute_loss_func would get a rank's part of a batch with unshifted labels: leave it out")
    if not trainer.model_accepts_loss_kwargs:
        raise ValueError(
            f"{type(trainer.model).__name__} takes no num_items_in_batch, so its loss is the mean of a rank's part, "
            "which is not the batch's: use a model whose forward takes **kwargs"
        )


def _check_lengths(trainer: Trainer) -> None:
    dp_size = plugin_of(trainer.args).session.require_group().dp_size
    for name in ("train_dataset", "eval_dataset"):
        for dataset in _values(getattr(trainer, name)):
            if isinstance(dataset, BatchedDataset) and len(dataset) % dp_size:
                raise ValueError(
                    f"{name} has {len(dataset)} batches for {dp_size} data parallel groups, so some would be trained "
                    f"twice: make it by dcp.batched(...) after the processes are started, or with multiple_of={dp_size}"
                )


def _values(dataset: Any) -> list[Any]:
    """Trainer takes one evaluation set, or a dict of several."""
    return list(dataset.values()) if isinstance(dataset, dict) else [dataset]
