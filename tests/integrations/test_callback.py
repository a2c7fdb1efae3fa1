"""The callback in one process: statistics, the line at the start, resume with workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

import hf_dcp
from tests.integrations.test_trainer import build, fresh, summary, train


class _Recorder(TrainerCallback):
    """What a logger such as TensorBoard's sees; it comes before the statistics in the list of callbacks."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def test_statistics_reach_loggers_and_the_start_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    fresh()
    recorder, statistics = _Recorder(), hf_dcp.DcpStatsCallback()
    with caplog.at_level("WARNING", logger="hf_dcp"):
        build(1, callbacks=[recorder, statistics], max_steps=4, logging_steps=2).train()
    steps = [logs for logs in recorder.logs if "loss" in logs]
    assert len(steps) == 2 and all(logs["dcp/tokens"] > 0 and logs["dcp/token_imbalance"] == 1 for logs in steps)
    assert statistics.summary()["tokens"] == sum(logs["dcp/tokens"] for logs in steps)
    (line,) = [record.getMessage() for record in caplog.records if "group(s)" in record.getMessage()]
    assert line.startswith("hf_dcp: 1 group(s) of 1 rank(s) on 1 node(s); first batch: ")


def test_resume_with_prefetch_in_a_later_epoch(tmp_path: Path) -> None:
    """Stopped in the second epoch, while workers had batches ready: not one is skipped or repeated."""
    options = {"save_strategy": "steps", "save_steps": 5, "dataloader_num_workers": 1, "output_dir": str(tmp_path)}
    straight = train(1, max_steps=7)
    fresh()
    build(1, **(options | {"max_steps": 5})).train()
    fresh()
    trainer = build(1, **(options | {"max_steps": 7}))
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert summary(trainer)["parameters"] == straight["parameters"]
    assert summary(trainer)["loss"] == straight["loss"]


def test_callback_added_to_a_built_trainer() -> None:
    fresh()
    trainer = build(1, callbacks=[], max_steps=1)
    trainer.add_callback(hf_dcp.DcpStatsCallback())
    trainer.train()
    assert "dcp/tokens" in trainer.state.log_history[0]
