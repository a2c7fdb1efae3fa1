"""Whole plans of 32 ranks in one process against dense attention."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hf_dcp.planning.planner import plan_batch
from hf_dcp.runtime.cases import Case, Inputs, dense, error_of
from hf_dcp.runtime.passes import Features
from hf_dcp.runtime.simulated import SimulatedRanks

BATCHES = Path(__file__).parents[2] / "benchmarks" / "data" / "reference_batches.json"
TOLERANCE = 1e-5


def lengths_of_c():
    """The long-tailed batch, its lengths divided by 8."""
    return tuple(max(1, n // 8) for n in json.loads(BATCHES.read_text())["batches"]["c_longtail"])


def errors(case, world, mail=None):
    plan = plan_batch(case.batch, case.topology(world), case.shape(), case.config())
    inputs = Inputs.of(case)
    ranks = SimulatedRanks(plan.rank_plans, mail=mail)
    results = ranks.execute(inputs, Features(case.window, case.scaling))
    sent = sum(sum(p.stats.sent.values()) for p in ranks.dcp_plans)
    return {n: error_of(case, inputs, results[n], x) for n, x in dense(case, inputs).items()}, sent


@pytest.mark.timeout(1000)  # some tens of seconds on an idle machine
@pytest.mark.parametrize("mask", ["causal", pytest.param("lambda:8,512", marks=pytest.mark.slow)])
def test_32_rank_plans_of_the_long_tailed_batch(mask):
    case = Case(mask, lengths_of_c(), 128, 2, 1, nodes=tuple(rank // 8 for rank in range(32)))
    found, sent = errors(case, 32)
    assert max(found.values()) <= TOLERANCE
    assert sent > 0


def test_a_message_that_is_lost_is_found():
    case = Case("causal", (512,), 64, 2, 1, nodes=(0, 0, 1, 1))

    class Lossy(dict):
        def __setitem__(self, key, value):
            super().__setitem__(key, torch.zeros_like(value) if len(self) % 2 else value)

    with pytest.raises(RuntimeError, match="don't execute the same plan"):
        errors(case, 4, Lossy())
