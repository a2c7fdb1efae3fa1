"""Stock trainers of TRL on a DCP group: `SFTTrainer`, `DPOTrainer` and `RewardTrainer`.

Collators and hooks do all of it; no trainer is subclassed and nothing of TRL is replaced.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_dcp.data.rows import Row
from hf_dcp.integrations.binding import attach
from hf_dcp.integrations.models import base_model
from hf_dcp.integrations.preferences import PreferenceCollator
from hf_dcp.integrations.trl_checks import trl_name
from hf_dcp.integrations.trl_model import watch_scores
from hf_dcp.lookahead.session import Session
from hf_dcp.masks import Mask, causal, documents


def packed(row: Row) -> Mask:
    """The mask of a row that `trl.pack_dataset` made: its documents, each causal; a row that was not packed is causal.

    Use it as the mask of the collator: ``dcp.collator(tokenizer, mask=packed)``.
    """
    lengths = row.get("seq_lengths")
    return causal() if lengths is None else documents(lengths)


def prepare_pairs(trainer: Any, model: nn.Module, session: Session) -> None:
    """Make trainer, collator and models of a run with pairs of answers known to each other."""
    collator: PreferenceCollator = trainer.data_collator
    rewards = trl_name(type(trainer)) == "RewardTrainer"
    collator.wanted = "scores" if rewards else "log_probs"
    if collator.stock is None:
        collator.stock = _stock_collator(trainer.args, collator.dummy_token, rewards)
    base = base_model(model)
    if rewards:
        attach(base.base_model, session)
        watch_scores(base)
        return
    attach(model, session)

    def attach_reference(module: nn.Module, args: tuple) -> None:
        """TRL makes its reference model after all that a callback sees of a trainer's set-up: with the first batch."""
        reference = getattr(trainer, "ref_model", None)
        if reference is not None:
            attach(reference, session)
        hook.remove()

    hook = base.register_forward_pre_hook(attach_reference)


def _stock_collator(args: Any, pad_token: int, rewards: bool) -> Any:
    """The collator that the trainer would have made."""
    if rewards:
        from trl.trainer.reward_trainer import DataCollatorForPreference as OfRewards

        return OfRewards(pad_token_id=pad_token)
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    return DataCollatorForPreference(
        pad_token_id=pad_token, max_length=args.max_length, truncation_mode=args.truncation_mode
    )
