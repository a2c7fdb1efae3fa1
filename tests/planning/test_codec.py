"""Rank plans as bytes: the same bytes always, nothing executed, and one clear sentence for anything else."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from hf_dcp import masks
from hf_dcp.config import DcpConfig
from hf_dcp.planning import BatchSpec, ModelShape, RankPlan, Topology, plan_batch
from hf_dcp.planning.codec import digest_of
from tests.planning.solvers import random_solver

SHAPE = ModelShape(4, 2, 4, "fp32", windows=((None, 2), (8, 1)))


def some_plan(seed: int = 0):
    batch = BatchSpec([50, 21], [masks.causal(), masks.lambda_mask(2, 9)])
    return plan_batch(batch, Topology.grid(2, 2), SHAPE, DcpConfig(block_size=8), solver=random_solver(seed))


PLAN = some_plan()
DATA = PLAN.rank(1).to_bytes()


def test_round_trip() -> None:
    for plan in PLAN.rank_plans:
        again = RankPlan.from_bytes(plan.to_bytes())
        assert again.to_bytes() == plan.to_bytes()
        assert (again.rank, again.digest, again.shape, again.node_of_rank) == (
            plan.rank,
            plan.digest,
            SHAPE,
            (0, 0, 1, 1),
        )
        assert np.array_equal(again.local_tokens(), plan.local_tokens())
        assert [part.window for part in again.windows] == [None, 8]


def test_digest_covers_every_array_of_every_rank() -> None:
    assert digest_of(list(PLAN.rank_plans)) != digest_of(list(some_plan(1).rank_plans))
    for rank in range(4):
        for window in (0, 1):
            plans = list(some_plan().rank_plans)
            items = plans[rank].windows[window].items
            items[0, 0] += 1
            assert digest_of(plans) != PLAN.digest


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_damaged_bytes_are_a_value_error_or_another_plan(position: int, flip: int) -> None:
    damaged = bytearray(DATA)
    damaged[position] ^= flip
    try:
        RankPlan.from_bytes(bytes(damaged))  # a flipped number is a plan still: checksums are the store's affair
    except ValueError as error:
        assert "plan" in str(error) or "must" in str(error)


@pytest.mark.parametrize("cut", [0, 4, 8, 100, len(DATA) // 2, len(DATA) - 1])
def test_truncated_bytes_are_refused(cut: int) -> None:
    with pytest.raises(ValueError, match="no rank plan"):
        RankPlan.from_bytes(DATA[:cut])


class Bomb:
    def __reduce__(self) -> tuple:
        return (pytest.fail, ("a payload was unpickled",))


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Bomb()),
        (2**32).to_bytes(8, "little") + b"{}",
        (8).to_bytes(8, "little") + b'{"a": 1}',
        save({"x": np.zeros(3)}, {"hf_dcp": json.dumps({"schema": 1})}),
        save({"x": np.zeros(3)}),
        b"[" * 100_000,
    ],
    ids=["pickle", "4 GB header", "no metadata", "no fields", "no header", "deep JSON"],
)
def test_hostile_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no rank plan"):
        RankPlan.from_bytes(data)


def test_another_schema_version_is_named() -> None:
    data = save({"x": np.zeros(3)}, {"hf_dcp": json.dumps({"schema": 99})})
    with pytest.raises(ValueError, match="schema version 99"):
        RankPlan.from_bytes(data)
