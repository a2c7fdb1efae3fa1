"""Memory that calls share: lent once at a time, reused, given up; and what autograd keeps is never overwritten."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from hf_dcp.planning.planner import plan_batch
from hf_dcp.runtime import Communicator, DcpPlan, attention
from hf_dcp.runtime.buffers import BufferPool, shaped
from hf_dcp.runtime.cases import Case
from tests.multiprocess import run_ranks
from tests.runtime.placements import random_placement

CPU = torch.device("cpu")
CASES = (Case("causal", (150, 37), 16), Case("shared", (90, 97), 16, seed=1))


def test_a_buffer_is_lent_once_at_a_time() -> None:
    pool = BufferPool(CPU)
    first, second = pool.lend(1000), pool.lend(1000)
    assert first.data_ptr() != second.data_ptr() and pool.made == 2 and pool.in_use == pool.peak >= 2000
    pool.take_back([first])
    third = pool.lend(1000)
    assert third.data_ptr() == first.data_ptr() and pool.made == 2


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000, 1025, 123_457, 10_000_000])
def test_buffers_are_little_larger_than_asked(size: int) -> None:
    pool = BufferPool(CPU)
    buffer = pool.lend(size)
    assert size <= buffer.numel() <= max(64, 1.25 * size + 64)
    assert shaped(buffer, (size // 8, 2), torch.float32).shape == (size // 8, 2)
    pool.take_back([buffer])
    assert pool.lend(size).data_ptr() == buffer.data_ptr()


def test_sizes_that_are_no_longer_used_are_given_up() -> None:
    pool = BufferPool(CPU)
    for size in range(1000, 60_000, 1000):
        pool.take_back([pool.lend(size)])
        assert pool._free_bytes <= 3 * pool.peak
    assert pool.in_use == 0


def steps(plans: list[DcpPlan], order: tuple[int, ...], keep: Literal["keep", "refetch"]) -> list[list[Tensor]]:
    """All forwards, then all backwards in an order: the results of each plan."""
    leaves, outs = [], []
    for i, plan in enumerate(plans):
        generator = torch.Generator().manual_seed(i)
        rows = plan.num_rows
        q, k, v = (torch.randn(1, rows, h, 16, generator=generator).transpose(1, 2).requires_grad_() for h in (8, 2, 2))
        leaves.append((q, k, v))
        outs.append(attention(q, k, v, plan, backward_kv=keep))
    gradients: dict[int, tuple[Tensor, ...]] = {}
    for i in order:
        grad = torch.randn(outs[i].shape, generator=torch.Generator().manual_seed(9 + i))
        gradients[i] = torch.autograd.grad(outs[i], leaves[i], grad)
    return [[outs[i].detach(), *gradients[i]] for i in range(len(plans))]


def mixed_steps() -> dict[str, Any]:
    communicator = Communicator.create()
    pool = communicator.buffers(CPU)
    plans = []
    for seed, case in enumerate(CASES):
        plan = plan_batch(case.batch, case.topology(2), case.shape(), case.config(), solver=random_placement(seed))
        plans.append(DcpPlan(plan.rank(communicator.rank)))
    equal, made = [], []
    for keep in ("refetch", "keep"):
        alone = [steps([plan], (0,), keep)[0] for plan in plans[:1]]  # type: ignore[arg-type]
        for order in ((0, 1), (1, 0)):
            together = steps(plans, order, keep)  # type: ignore[arg-type]
            again = steps(plans, order[::-1], keep)  # type: ignore[arg-type]
            equal += [torch.equal(a, b) for a, b in zip(alone[0], together[0])]
            equal += [torch.equal(a, b) for x, y in zip(together, again) for a, b in zip(x, y)]
            made.append(pool.made)
    return {"equal": equal, "made": made, "in_use": pool.in_use}


def test_calls_share_memory_and_results_keep_theirs() -> None:
    for answer in run_ranks(mixed_steps, 2):
        assert len(answer["equal"]) == 48 and all(answer["equal"])
        assert answer["in_use"] == 0
        first, second, third, last = answer["made"]
        assert first == second and third == last, "equal steps make no new buffers"


def overwritten() -> bool:
    """Whether results survive a pool that hands out memory that is still in use."""
    communicator = Communicator.create()
    case = replace(CASES[0], seed=5)
    plan = plan_batch(case.batch, case.topology(2), case.shape(), case.config(), solver=random_placement(0))
    own = DcpPlan(plan.rank(communicator.rank))
    want = steps([own], (0,), "refetch")[0]
    one = torch.empty(4_000_000, dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BufferPool, "lend", lambda self, size: one[:size])
        patch.setattr("hf_dcp.runtime.exchange.Exchanges.give_back", lambda self, buffer: None)
        patch.setattr(BufferPool, "take_back", lambda self, buffers: None)
        try:
            got = steps([own], (0,), "refetch")[0]
        except RuntimeError:
            return False
    return all(torch.equal(a, b) for a, b in zip(want, got))


def test_shared_memory_in_use_would_be_noticed() -> None:
    assert not any(run_ranks(overwritten, 2, group_timeout=10.0))
