"""Static schemes run by the executor give dense attention, and send what they plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hf_dcp.planning.static import SCHEMES, plan_static
from hf_dcp.runtime.cases import Case, Inputs, dense, error_of
from hf_dcp.runtime.checks import executed, planned_bytes, sent_bytes
from hf_dcp.runtime.groups import Communicator
from hf_dcp.runtime.handle import DcpPlan
from tests.multiprocess import run_ranks

LENGTHS = (67, 1, 32, 130)


@dataclass(frozen=True)
class Execution:
    scheme: str
    case: Case
    team: int | None = None


def executions(nodes: tuple[int, ...]) -> list[Execution]:
    masks = ("causal", "lambda:3,33", "shared", "full")
    found = [
        Execution(scheme, Case(mask, LENGTHS, 1, nodes=nodes, backward_kv=keep))
        for scheme, mask, keep in zip(SCHEMES, masks, ("refetch", "keep", "keep", "refetch"))
    ]
    found += [
        Execution("loongtrain", Case("blockwise:16,2,1,1", LENGTHS, 1, 6, 1, nodes=nodes)),
        Execution("head-ring", Case("causal", (3, 1), 1, 4, 4, nodes=nodes, window=2)),
        Execution("zigzag", Case("causal", LENGTHS, 1, 6, 1, nodes=nodes, dtype="fp64", reduce_dtype="fp32")),
    ]
    if len(nodes) == 4:
        found.append(Execution("head-ring", Case("ranges", LENGTHS, 1, 8, 4, nodes=nodes), team=4))
    return found


def check(nodes: tuple[int, ...]) -> list[dict[str, Any]]:
    communicator = Communicator.create()
    return [_run(execution, communicator) for execution in executions(nodes)]


def _run(execution: Execution, communicator: Communicator) -> dict[str, Any]:
    case, world = execution.case, communicator.world_size
    plan = plan_static(
        execution.scheme, case.batch, case.topology(world), case.shape(), case.config(), team=execution.team, pad=False
    )
    own = DcpPlan(plan.rank(communicator.rank), communicator.id, case.backward_kv)
    inputs = Inputs.of(case)
    results = executed(case, inputs, own)
    for value in results.values():
        torch.distributed.all_reduce(value)
    reference = dense(case, inputs)
    errors = {name: error_of(case, inputs, results[name], reference[name]) for name in ("out", "dq", "dk", "dv")}
    return {
        "what": f"{execution.scheme} {case.name}",
        "errors": errors,
        "sent": sent_bytes(own, communicator),
        "planned": planned_bytes(plan.rank_plans, case.window, case.backward_kv == "keep"),
    }


SLOW = [pytest.param(nodes, marks=pytest.mark.slow) for nodes in ((0, 1, 0), (0, 1, 2, 3))]


@pytest.mark.parametrize("nodes", [(0, 0), (0, 0, 1, 1), *SLOW], ids=str)
def test_exact_and_bytes(nodes: tuple[int, ...]) -> None:
    for results in zip(*run_ranks(check, len(nodes), nodes)):
        assert all(result["sent"] == result["planned"] for result in results), results[0]
        assert max(results[0]["errors"].values()) < 1e-5, results[0]


def test_one_rank() -> None:
    for scheme in SCHEMES:
        case = Case("causal", LENGTHS, 1, nodes=(0,))
        plan = plan_static(scheme, case.batch, case.topology(1), case.shape(), pad=False)
        inputs = Inputs.of(case)
        results, reference = executed(case, inputs, DcpPlan(plan.rank(0))), dense(case, inputs)
        assert all(error_of(case, inputs, results[name], reference[name]) < 1e-5 for name in reference)


def test_padded_rows_are_zero_and_change_nothing() -> None:
    case = Case("causal", (5, 12), 1, nodes=(0,))
    exact, padded = (
        plan_static("loongtrain", case.batch, case.topology(1), case.shape(), pad=pad) for pad in (False, True)
    )
    assert padded.batch.lengths == (12, 12)
    inputs = Inputs.of(case)
    real = torch.tensor([*range(5), *range(12, 24)])

    def spread(x: torch.Tensor) -> torch.Tensor:
        return torch.ones(24, *x.shape[1:]).index_copy_(0, real, x)

    wide = Inputs(*(spread(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)), None)
    results = executed(case, inputs, DcpPlan(exact.rank(0)))
    for name, value in executed(case, wide, DcpPlan(padded.rank(0))).items():
        assert error_of(case, inputs, value[real], results[name]) < 1e-6
        value[real] = 0
        assert not value.any()
