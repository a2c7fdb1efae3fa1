"""One batch, one plan: the same bytes in every process, with any number of threads, and whatever was planned before."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

from hf_dcp import masks
from hf_dcp.planning import BatchSpec, ModelShape, Topology, plan_batch

PROGRAM = """
import sys
from tests.planning import test_determinism
print(*getattr(test_determinism, sys.argv[1])())
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


def large_batches() -> list[BatchSpec]:
    """131,072 tokens: one sequence, one with answers, and mixed lengths with masks of every kind of seed."""
    mixed = [17725, 12801, 9973, 9000, 8191, *(7000 - 177 * i for i in range(12))]
    mixed += [131072 - sum(mixed)]
    kinds = ("causal", "lambda:64,4096", "blockwise:256,2,1,1", "shared:0.2x4")
    single = [BatchSpec([131072], masks.parse_mask(kind)) for kind in ("causal", "shared:0.2x4")]
    return [*single, *(BatchSpec(mixed, masks.parse_mask(kind)) for kind in kinds)]


def large_digests() -> list[int]:
    plans = [plan_batch(batch, Topology.grid(4, 8), ModelShape(8, 2, 128)) for batch in large_batches()]
    sent = [hashlib.sha256(b"".join(part.to_bytes() for part in plan.rank_plans)).hexdigest() for plan in plans]
    return [int(digest[:16], 16) for digest in sent]


def in_new_process(function: str = "digests", **environment: str) -> list[int]:
    command = [sys.executable, "-c", PROGRAM, function]
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_large_plans_are_the_same_bytes_everywhere() -> None:
    """Bytes of the rank plans of large batches: here, in new processes with 1 and 2 threads, and planned again."""
    here = large_digests()
    for threads, seed in (("1", "1"), ("2", "2")):
        environment = {"OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads, "PYTHONHASHSEED": seed}
        assert in_new_process("large_digests", **environment) == here
    assert large_digests() == here


def test_what_was_planned_before_does_not_matter() -> None:
    first = digests()
    assert digests() == first
    assert [plan_batch(b, Topology.grid(2, 4), SHAPE).digest for b in reversed(batches())] == first[::-1]


def test_different_inputs_have_different_digests() -> None:
    batch = batches()[1]
    longer = BatchSpec([*batch.lengths[:-1], batch.lengths[-1] + 1], masks.causal())
    plans = [(batch, Topology.grid(2, 4)), (longer, Topology.grid(2, 4)), (batch, Topology.grid(4, 2))]
    assert len({plan_batch(b, t, SHAPE).digest for b, t in plans}) == 3
