"""Exactness over numbers of ranks and divisions, idle ranks, and layouts of inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_dcp.planning.planner import plan_batch
from hf_dcp.runtime import Communicator, DcpPlan, attention
from hf_dcp.runtime.cases import RESULTS, Case
from hf_dcp.runtime.checks import run_case
from tests.multiprocess import run_ranks
from tests.runtime.placements import random_placement

BASE = Case("causal", (150, 37), 16)
DIVISIONS = (1, 2, 4, 8)
IDLE = {"all busy": {}, "no token": {"owners": -1}, "no tile": {"workers": -1}, "neither": {"idle": 1}}
"""What ranks lack; -1: all ranks but one."""


def combinations(world_size: int, step: int) -> list[tuple[Case, dict[str, int]]]:
    """Every ``step``-th combination of divisions, backward_kv, what ranks lack, and mask."""
    found = []
    for t in DIVISIONS:
        for kv in ("refetch", "keep"):
            for lack in IDLE.values():
                for mask in ("causal", "ranges", "shared"):
                    solver = {name: world_size - 1 if n < 0 else n for name, n in lack.items()}
                    # relaying needs nodes of several ranks, which uneven ones have too
                    nodes = tuple(rank // 3 for rank in range(world_size)) if mask == "shared" else None
                    found.append((replace(BASE, mask=mask, divisions=t, backward_kv=kv, nodes=nodes), solver))
    return found[::step]


def exact(world_size: int, step: int) -> list[dict[str, Any]]:
    communicator = Communicator.create()
    return [
        run_case(replace(case, seed=i), communicator, random_placement(i, **lack), repeat=True, reference=i % 8 == 0)
        for i, (case, lack) in enumerate(combinations(world_size, step))
    ]


def check_exact(world_size: int, step: int, timeout: float) -> None:
    results = run_ranks(exact, world_size, world_size, step, timeout=timeout)
    assert results.count(results[0]) == world_size
    assert len(results[0]) == len(combinations(world_size, step))
    assert not [case for case in results[0] if not case["ok"]]
    assert sum(case["bytes_sent"] for case in results[0]) > 100_000 * len(results[0])


def test_some_of_all_on_three_ranks() -> None:
    """A prime step: every value of everything occurs."""
    cases = combinations(3, 7)
    assert {case.divisions for case, _ in cases} == set(DIVISIONS)
    assert len({(case.backward_kv, case.mask) for case, _ in cases}) == 6
    assert len({str(lack) for _, lack in cases}) == len(IDLE)
    check_exact(3, 7, 120.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 8])
def test_all_combinations(world_size: int) -> None:
    check_exact(world_size, 1, 800.0)


def errors_of(divisions: int) -> list[float]:
    communicator = Communicator.create()
    case = replace(BASE, lengths=(700, 90), divisions=divisions)
    result = run_case(case, communicator, random_placement(3), reference=False)
    return [result[name] for name in RESULTS]


@pytest.mark.slow
def test_errors_do_not_grow_with_ranks() -> None:
    alone = run_case(replace(BASE, lengths=(700, 90)), None)
    for world_size in (2, 4, 8):
        for error, name in zip(run_ranks(errors_of, world_size, 4)[0], RESULTS):
            assert error <= max(2 * alone[name], 3e-7), (world_size, name)


def layouts() -> list[bool]:
    """Results for inputs of several layouts, forward and backward, against those of contiguous ones."""
    communicator = Communicator.create()
    plan = plan_batch(BASE.batch, BASE.topology(2), BASE.shape(), BASE.config(), solver=random_placement(2))
    own = DcpPlan(plan.rank(communicator.rank))
    fused = torch.randn(1, own.num_rows, 12, 32, generator=torch.Generator().manual_seed(communicator.rank))
    grad = torch.randn(1, own.num_rows, 8, 32, generator=torch.Generator().manual_seed(5))[..., ::2]
    q, k, v = fused.transpose(1, 2)[..., 1::2].split([8, 2, 2], 1)
    variants = [
        [x.contiguous() for x in (q, k, v, grad)],
        [q, k, v, grad],
        [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)] + [grad.expand_as(grad)],
    ]
    results = []
    for *inputs, upstream in variants:
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = attention(*leaves, own)  # type: ignore[arg-type]
        results.append([out.detach(), *torch.autograd.grad(out, leaves, upstream)])
    assert not any(x.is_contiguous() for x in variants[1])
    return [torch.allclose(a, b, rtol=1e-5, atol=1e-6) for other in results[1:] for a, b in zip(results[0], other)]


def test_layouts_of_inputs_do_not_matter() -> None:
    for answer in run_ranks(layouts, 2):
        assert len(answer) == 8 and all(answer)
