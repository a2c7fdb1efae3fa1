"""One batch, one plan: the same bytes in every process, with any number of threads, and whatever was planned before."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hf_dcp import masks
from hf_dcp.planning import BatchSpec, ModelShape, Topology, plan_batch

PROGRAM = """
from tests.planning.test_determinism import digests
print(*digests())
"""
SHAPE = ModelShape(8, 2, 64, windows=((None, 3), (512, 1)))


def batches() -> list[BatchSpec]:
    mixed = [900, 5000, 33, 1700, 1700, 64, 2500, 3001]
    return [
        BatchSpec([16384], masks.causal()),
        BatchSpec(mixed, masks.causal()),
        BatchSpec(mixed, [masks.lambda_mask(8, 512)] * 4 + [masks.parse_mask("shared:0.2x4")] * 4),
    ]


def digests() -> list[int]:
    return [plan_batch(batch, Topology.grid(2, 4), SHAPE).digest for batch in batches()]


def in_new_process(**environment: str) -> list[int]:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=240, check=True
    )
    return [int(word) for word in done.stdout.split()]


@pytest.mark.timeout(300)
def test_processes_and_thread_counts_agree() -> None:
    here = digests()
    for threads, seed in (("1", "1"), ("2", "2")):
        environment = {"OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads, "PYTHONHASHSEED": seed}
        assert in_new_process(**environment) == here


def test_what_was_planned_before_does_not_matter() -> None:
    first = digests()
    assert digests() == first
    assert [plan_batch(b, Topology.grid(2, 4), SHAPE).digest for b in reversed(batches())] == first[::-1]


def test_different_inputs_have_different_digests() -> None:
    batch = batches()[1]
    longer = BatchSpec([*batch.lengths[:-1], batch.lengths[-1] + 1], masks.causal())
    plans = [(batch, Topology.grid(2, 4)), (longer, Topology.grid(2, 4)), (batch, Topology.grid(4, 2))]
    assert len({plan_batch(b, t, SHAPE).digest for b, t in plans}) == 3
