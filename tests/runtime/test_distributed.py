"""Plans on groups of gloo processes, against dense fp64 attention: any placement, all features, faults."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hf_dcp.planning.plan import Message, PassPlan, RankPlan
from hf_dcp.planning.planner import plan_batch
from hf_dcp.runtime import Communicator, DcpPlan, attention
from hf_dcp.runtime.cases import Case, Inputs
from hf_dcp.runtime.checks import RESULTS, executed, run_case
from hf_dcp.runtime.kernels import merge as merging
from hf_dcp.runtime.kernels.masks import CallMask
from hf_dcp.runtime.selftest import BLOCK_SIZES, HEADS, LENGTHS, MASKS, make_cases
from tests.multiprocess import run_ranks
from tests.runtime.placements import random_placement

BASE = Case("causal", (150, 37), 16)
FEATURES = [
    replace(BASE, softcap=2.0),
    replace(BASE, sinks=True, dtype="bf16"),
    replace(BASE, sinks=True, softcap=1.0, window=20, backward_kv="keep"),
    replace(BASE, window=9, mask="full"),
    replace(BASE, scale=0.3, head_groups=1, divisions=1),
    replace(BASE, dtype="bf16", backward_kv="keep"),
    replace(BASE, dtype="bf16", reduce_dtype="fp32"),
    replace(BASE, reduce_dtype="bf16"),
    replace(BASE, dtype="fp16"),
    replace(BASE, dtype="fp64", divisions=8),
    replace(BASE, mask="ranges", backward_kv="keep", divisions=2, head_dim=5),
    replace(BASE, nodes=(0,)),
]


def exact_cases(world_size: int) -> list[dict[str, Any]]:
    """Every mask, lengths, and feature, each under some random placement."""
    communicator = Communicator.create()
    cases = [
        Case(mask, lengths, BLOCK_SIZES[(m + n) % 2], *HEADS[(m + n) % 3], backward_kv=("refetch", "keep")[n % 2])
        for m, mask in enumerate(MASKS)
        for n, lengths in enumerate(LENGTHS[:-1])
    ]
    cases += [replace(c, nodes=c.nodes * world_size if c.nodes else None) for c in FEATURES]
    results = []
    for seed, case in enumerate(cases):
        # Now and then ranks without tokens, without tiles, or with neither.
        owners = world_size - 1 if seed % 3 == 0 and world_size > 1 else None
        workers = world_size - 1 if seed % 4 == 0 and world_size > 1 else None
        case = replace(case, seed=seed)
        solver = random_placement(seed, owners, workers)
        results.append(run_case(case, communicator, solver, repeat=seed % 5 == 0, reference=seed % 2 == 0))
    return results


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_any_plan_is_exact(world_size):
    results = run_ranks(exact_cases, world_size, world_size, timeout=200)
    assert results.count(results[0]) == world_size, "all ranks get the same verdict"
    assert len(results[0]) == 45 + len(FEATURES)
    failed = [case for case in results[0] if not case["ok"]]
    assert not failed
    assert sum(case["bytes_sent"] for case in results[0]) > 1_000_000


def test_selftest_subset_is_pairwise():
    cases = make_cases()
    assert 50 <= len(cases) <= 70
    for first, second in (("mask", "lengths"), ("mask", "block_size"), ("mask", "heads"), ("lengths", "block_size")):
        pairs = {(getattr(case, first), getattr(case, second)) for case in cases}
        full = {(getattr(case, first), getattr(case, second)) for case in make_cases(full=True)}
        assert pairs == full
    pairs = {(case.lengths, case.heads) for case in cases} | {(case.block_size, case.heads) for case in cases}
    assert len(pairs) == len(LENGTHS) * len(HEADS) + len(BLOCK_SIZES) * len(HEADS)


def own_plan(case: Case, communicator: Communicator, solver: Any = None) -> tuple[list[RankPlan], RankPlan]:
    world = communicator.world_size
    plan = plan_batch(case.batch, case.topology(world), case.shape(), case.config(), solver=solver)
    return list(plan.rank_plans), plan.rank(communicator.rank)


def negative_controls() -> dict[str, bool]:
    """Whether the checks still pass when the runtime is broken in these ways."""
    communicator = Communicator.create()
    case = replace(BASE, mask="shared", block_size=64)
    verdicts = {}
    with pytest.MonkeyPatch.context() as patch:
        verdicts["intact"] = run_case(case, communicator, random_placement(3))["ok"]
        patch.setattr("hf_dcp.runtime.passes.merge", merge_without_lse)
        verdicts["merged without lse"] = run_case(case, communicator, random_placement(3))["ok"]
    with pytest.MonkeyPatch.context() as patch:
        # Where all else is in an unmasked call, the last row of an upper triangle has nothing in the masked one.
        patch.setattr("hf_dcp.runtime.calls.CALL_COST", 1)
        patch.setattr("hf_dcp.runtime.calls.WORTH", 0)
        triangles = replace(case, mask="full", window=40)
        verdicts["intact"] &= run_case(triangles, communicator, random_placement(3))["ok"]
        patch.setattr("hf_dcp.runtime.kernels.masks.MaskCache._build", build_without_empty_rows)
        verdicts["lse of empty rows"] = run_case(triangles, communicator, random_placement(3))["ok"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_dcp.runtime.kernels.aten.stand_in", lambda grad, delta: torch.zeros_like(grad))
        verdicts["no delta"] = run_case(case, communicator, random_placement(3))["ok"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_dcp.runtime.passes.Backward.reduce", lambda self, exchange: None)
        verdicts["partial gradients dropped"] = run_case(case, communicator, random_placement(3))["ok"]
    return verdicts


def merge_without_lse(out, lse, part, part_lse):
    part_lse = torch.where(part_lse == float("-inf"), part_lse, torch.zeros_like(part_lse))
    merging.merge(out, lse, part, part_lse)


def build_without_empty_rows(self, spec):
    allowed = torch.from_numpy(spec.build())
    additive = torch.zeros(allowed.shape, dtype=self.dtype).masked_fill_(~allowed, float("-inf"))
    return CallMask(additive, empty=None)


def different_plans() -> str:
    communicator = Communicator.create()
    _, own = own_plan(replace(BASE, seed=1), communicator)
    if communicator.rank == 1:
        own = replace(own, digest=own.digest ^ 1)
    try:
        executed(BASE, Inputs.of(BASE), DcpPlan(own))
    except RuntimeError as error:
        return str(error)
    return "no error"


def other_lengths() -> str:
    """Rank 0 sends one row less than the plan says."""
    communicator = Communicator.create()
    _, own = own_plan(BASE, communicator, random_placement(1))
    if communicator.rank == 0:
        part = own.windows[0]
        messages = part.forward.messages
        first = np.flatnonzero((messages[:, Message.INCOMING] == 0) & (messages[:, Message.KV_END] > 0))[0]
        runs = part.forward.kv_runs.copy()
        longest = messages[first, Message.KV_BEGIN] + np.argmax(
            runs[messages[first, Message.KV_BEGIN] : messages[first, Message.KV_END], 1]
        )
        runs[longest, 1] -= 1
        shortened: PassPlan = replace(part.forward, kv_runs=runs)
        own = replace(own, windows=(replace(part, forward=shortened),))
    try:
        executed(BASE, Inputs.of(BASE), DcpPlan(own))
    except RuntimeError as error:
        if communicator.rank == 1:
            time.sleep(1)
        return str(error)
    return "no error"


def dropped_message() -> str:
    """Rank 0 never sends the first message that it should."""
    communicator = Communicator.create()
    _, own = own_plan(BASE, communicator, random_placement(1))
    if communicator.rank == 0:
        part = own.windows[0]
        messages = part.forward.messages
        first = np.flatnonzero(messages[:, Message.INCOMING] == 0)[0]
        dropped = replace(part.forward, messages=np.delete(messages, first, 0))
        own = replace(own, windows=(replace(part, forward=dropped),))
    try:
        executed(BASE, Inputs.of(BASE), DcpPlan(own))
    except RuntimeError as error:
        return str(error)
    return "no error"


def killed_peer() -> str:
    communicator = Communicator.create()
    _, own = own_plan(BASE, communicator, random_placement(1))
    plan = DcpPlan(own)
    inputs = Inputs.of(BASE)
    executed(BASE, inputs, plan)
    if communicator.rank == 1:
        os._exit(1)
    try:
        executed(BASE, inputs, plan)
    except RuntimeError as error:
        return str(error)
    return "no error"


def two_groups() -> list[Any]:
    """Two groups of two ranks, each with a batch of its own."""
    communicator = Communicator.create([[0, 2], [3, 1]])
    assert communicator.ranks[communicator.rank] == dist.get_rank()
    case = replace(BASE, seed=communicator.ranks[0])
    return [communicator.rank, run_case(case, communicator, random_placement(communicator.ranks[0]))["ok"]]


def test_checks_fail_when_the_runtime_is_broken():
    verdicts = run_ranks(negative_controls, 2)[0]
    assert verdicts.pop("intact")
    assert len(verdicts) == 4 and not any(verdicts.values()), verdicts


def test_different_digests_are_an_error_on_every_rank():
    for text in run_ranks(different_plans, 3):
        assert "different plans" in text and "on ranks [0, 2]" in text and "on ranks [1]" in text


def test_a_message_of_another_length_is_an_error():
    texts = run_ranks(other_lengths, 2, group_timeout=10.0)
    assert "payload bytes" in texts[1] and "rank 0" in texts[1] and "exchange" in texts[1]


def test_a_message_that_never_comes_is_an_error_within_the_time_out():
    begin = time.monotonic()
    texts = run_ranks(dropped_message, 2, group_timeout=4.0)
    assert time.monotonic() - begin < 90
    assert "receiving from rank 0" in texts[1] and "of forward on rank 1" in texts[1]


def test_a_killed_rank_is_named():
    answers = run_ranks(killed_peer, 3, group_timeout=10.0, expect_failure=True)
    assert answers[1] is None
    assert any("rank 1 of the group" in text and "exchange" in text for text in (answers[0], answers[2]))
    assert "no error" not in answers


def test_two_groups_at_once():
    assert run_ranks(two_groups, 4) == [[0, True], [1, True], [1, True], [0, True]]


def test_results_have_the_documented_fields():
    """One rank, no process group: the plain case of a laptop."""
    result = run_case(BASE, None)
    assert result["ok"] and result["bytes_sent"] == 0 and set(RESULTS) <= set(result)
    assert callable(attention)
