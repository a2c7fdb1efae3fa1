"""`DcpStatsCallback`: what a stock Trainer needs besides plugin and collator, and what its user wants to see."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_dcp.data.collator import DcpCollator
from hf_dcp.integrations.accelerate import DcpParallelismConfig
from hf_dcp.integrations.binding import plan_of
from hf_dcp.integrations.evaluation import Evaluation, ShiftedLabelSmoother
from hf_dcp.integrations.models import base_model
from hf_dcp.integrations.preferences import PreferenceCollator
from hf_dcp.integrations.statistics import start_line
from hf_dcp.integrations.trainer_checks import calling_trainer, check_trainer, plugin_of
from hf_dcp.integrations.trainer_fixes import fix_total_batch_size, time_batches
from hf_dcp.integrations.trl import prepare_pairs
from hf_dcp.lookahead.batch_plan import BatchPlan
from hf_dcp.lookahead.session import Session
from hf_dcp.lookahead.statistics import StepStatistics, total_over_ranks

logger = logging.getLogger("hf_dcp")


class DcpStatsCallback(TrainerCallback):
    """Pass one to every Trainer that trains with DCP.

    When the Trainer is built it checks model and settings, makes the model known to the collator, and corrects the few
    numbers in which Trainer takes DCP ranks for data parallel ones. While it trains it adds to each log entry, under
    ``dcp/...``: tokens, bytes between and inside nodes, their ratio to a dense static ring, imbalances, seconds of
    planning, seconds that steps waited, and where plans came from. At the start it prints one line.

    Raises:
        ValueError: in the constructor of Trainer, on every rank, for what DCP can't honour.
    """

    def __init__(self) -> None:
        self.total = StepStatistics()
        """Sums over the run so far, over all ranks."""
        self._since_log = StepStatistics()
        self._since_step = 0
        self._tokens_at_start = 0
        self._tokens_seen = 0
        self._ready = False
        self._session: Session | None = None

    def summary(self) -> dict[str, float]:
        """The statistics of the whole run so far, as in the log entries."""
        return self.total.means()

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        trainer = calling_trainer()
        if trainer is None:
            raise ValueError(
                "DcpStatsCallback was not called by a Trainer of Transformers: pass it to Trainer(callbacks=...)"
            )
        self._prepare(trainer, model)

    def _prepare(self, trainer: Trainer, model: nn.Module) -> None:
        plugin = plugin_of(trainer.args)
        session = self._session = plugin.session
        check_trainer(trainer)
        if isinstance(trainer.data_collator, PreferenceCollator):
            prepare_pairs(trainer, model, session)
        else:
            plugin.attach(model)
        if trainer.args.average_tokens_across_devices:
            session.loss_scale = session.require_group().loss_ranks
        evaluation = Evaluation(trainer, session)
        if trainer.label_smoother is not None:
            trainer.label_smoother = ShiftedLabelSmoother(trainer, evaluation)

        def before_forward(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            plan = plan_of(kwargs)
            if not isinstance(plan, BatchPlan):
                return
            evaluation.start(plan)
            if module.training:
                self._record(plan)

        base_model(model).register_forward_pre_hook(before_forward, with_kwargs=True)
        fix_total_batch_size(trainer, session)
        self._run_ahead(trainer, plugin)
        # First of all, so that loggers see what it adds to the logs.
        callbacks = trainer.callback_handler.callbacks
        callbacks.remove(self)
        callbacks.insert(0, self)
        self._ready = True

    def _run_ahead(self, trainer: Trainer, plugin: DcpParallelismConfig) -> None:
        """Give the Trainer's DataLoaders the workers that the look-ahead wants, and watch how long it waits for them."""
        args = trainer.args
        # Trainer's default of no workers can't be told from a wish; a look-ahead that was asked for comes first.
        workers = args.dataloader_num_workers or (None if plugin.lookahead else 0)
        depth = plugin.plan_ahead(workers, args.dataloader_prefetch_factor)
        args.dataloader_num_workers = depth.workers
        args.dataloader_prefetch_factor = depth.prefetch or None
        time_batches(trainer, lambda: self._since_log)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        trainer = calling_trainer()
        if not self._ready and trainer is not None:  # added by add_callback, after the Trainer was built
            self._prepare(trainer, model)
        assert self._session is not None and trainer is not None and isinstance(trainer.data_collator, DcpCollator)
        report = trainer.data_collator.preview(trainer.train_dataset)
        if state.is_world_process_zero:
            logger.warning(start_line(self._session, report))
        self._tokens_at_start = state.num_input_tokens_seen
        self._tokens_seen = 0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        step, self._since_step = self._since_step, 0
        if args.include_num_input_tokens_seen != "no":  # Trainer counts dummy rows
            mine = torch.tensor([float(step)], dtype=torch.float64)
            self._tokens_seen += int(total_over_ranks(mine, args.device)[0])
            state.num_input_tokens_seen = self._tokens_at_start + self._tokens_seen

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "loss" not in logs:
            return
        steps, self._since_log = self._since_log.over_ranks(args.device), self._since_log.next()
        self.total.add(steps)
        added = {f"dcp/{name}": value for name, value in steps.means().items()}
        logs.update(added)
        if state.log_history:
            state.log_history[-1].update(added)

    def _record(self, plan: BatchPlan) -> None:
        """Count a forward in training."""
        if plan.rank_plan.rank == 0:  # one rank of each group speaks for it
            self._since_step += plan.report.tokens
        self._since_log.record(plan)
