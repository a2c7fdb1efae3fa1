"""Which of TRL's trainers run with DCP, and with which settings; the others are refused by name. TRL is not imported."""

from __future__ import annotations

from typing import Any

from hf_dcp.integrations.models import base_model
from hf_dcp.integrations.preferences import PreferenceCollator

PAIRS = ("DPOTrainer", "RewardTrainer")
SUPPORTED = ("SFTTrainer", *PAIRS)


def trl_name(kind: type) -> str | None:
    """The name of TRL's trainer that a class is, or is derived from; None if it is none."""
    return next((c.__name__ for c in kind.__mro__ if c.__module__.partition(".")[0] == "trl"), None)


def refuse_trainer(kind: type) -> None:
    """Raise ValueError for a trainer of TRL that generates, or takes a rank's part of a batch for a whole one."""
    name = trl_name(kind)
    experimental = name in SUPPORTED and any(c.__module__.startswith("trl.experimental.") for c in kind.__mro__)
    if name is None or (name in SUPPORTED and not experimental):
        return
    raise ValueError(
        f"{'the experimental ' if experimental else ''}{name} can't run with DCP: it generates, or computes its loss of "
        f"whole sequences, of which a rank has a part; use one of {', '.join(SUPPORTED)}, or leave the "
        "DcpParallelismConfig out"
    )


def check_trl(trainer: Any) -> None:
    """Raise ValueError for a trainer of TRL, or a collator of pairs, that doesn't fit.

    Args:
        trainer: any Trainer.
    """
    refuse_trainer(type(trainer))
    name = trl_name(type(trainer))
    pairs = isinstance(trainer.data_collator, PreferenceCollator)
    if pairs != (name in PAIRS):
        right = "dcp.preference_collator(tokenizer)" if name in PAIRS else "dcp.collator(tokenizer, mask=...)"
        raise ValueError(f"data_collator of {name or type(trainer).__name__} must be {right}")
    if name is None:
        return
    if trainer.compute_metrics is not None or trainer.args.label_smoothing_factor:
        raise ValueError(
            f"compute_metrics and label_smoothing_factor of {name} can't be honoured by DCP, for TRL computes logits of a "
            "rank's part for them: leave them out"
        )
    _refuse_prompt_learning(trainer.model)
    config = base_model(trainer.model).config.get_text_config()
    given = getattr(trainer.args, "router_aux_loss_coef", None)
    coefficient = getattr(config, "router_aux_loss_coef", 0.0) if given is None else given
    if hasattr(config, "output_router_logits") and coefficient:
        raise ValueError(
            f"router_aux_loss_coef={coefficient} can't be honoured by DCP: the loss of the router is not linear in the "
            "tokens of a rank; set router_aux_loss_coef=0.0"
        )
    group = trainer.data_collator.session.require_group()
    if getattr(trainer.args, "precompute_ref_log_probs", False) and (group.size > 1 or trainer.is_fsdp_enabled):
        raise ValueError(
            "precompute_ref_log_probs=True can't be honoured by DCP: TRL joins what all ranks have computed beforehand, and "
            "the ranks of a group have the same; leave it out"
        )


def _refuse_prompt_learning(model: Any) -> None:
    for adapter in getattr(model, "peft_config", {}).values():
        if getattr(adapter, "is_prompt_learning", False):
            raise ValueError(
                f"{adapter.peft_type} of PEFT puts tokens before each sequence, which DCP can't do: use LoRA or another "
                "adapter of weights"
            )
