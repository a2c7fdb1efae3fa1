"""The attention operator in one process: layouts, lifetimes of plans, checkpointing, compilation, wrong arguments."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from hf_dcp.masks import causal
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.planner import DcpConfig, plan_batch
from hf_dcp.runtime import DcpPlan, attention, find_plan
from hf_dcp.runtime.cases import Case, Inputs, dense

SHAPE = ModelShape(4, 2, 8, "fp32")


def make_plan(*lengths: int, shape: ModelShape = SHAPE, **options) -> DcpPlan:
    plan = plan_batch(BatchSpec(lengths, causal()), Topology((0,)), shape, DcpConfig(block_size=16))
    return DcpPlan(plan.rank(0), **options)


class Layer(torch.nn.Module):
    """A layer whose Q, K and V are strided views of one tensor, as models make them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = torch.nn.Linear(32, 64)

    def forward(self, x: torch.Tensor, plan: DcpPlan | int, backward_kv: str | None = None) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (8, 8)).transpose(1, 2).split([4, 2, 2], 1)
        return attention(q, k, v, plan, backward_kv=backward_kv).flatten(2)


def step(layer: Layer, x: torch.Tensor, plan: DcpPlan | int, wrap=None, **options) -> tuple[torch.Tensor, torch.Tensor]:
    layer.zero_grad()
    out = (layer if wrap is None else wrap)(x, plan, **options)
    out.sin().sum().backward()
    return out.detach(), layer.project.weight.grad.clone()


@pytest.mark.parametrize("layout", ["heads first", "tokens first", "strided", "last dimension strided"])
def test_any_strides(layout):
    case = Case("causal", (45,), 16, 4, 2, head_dim=8)
    inputs = Inputs.of(case)
    leaves = []
    for x in (inputs.q, inputs.k, inputs.v):
        x = x.transpose(0, 1)[None]
        if layout == "heads first":
            x = x.contiguous()
        if layout == "strided":
            x = torch.stack([x, x], 3).flatten(3, 4)[..., ::1].unflatten(3, (2, 8))[..., 1, :]
        if layout == "last dimension strided":
            x = torch.stack([x, x + 1], -1)[..., 0]
        leaves.append(x.detach().requires_grad_())
    out = attention(*leaves, make_plan(45))
    gradients = torch.autograd.grad(out, leaves, inputs.dout[None])
    want = dense(case, inputs)
    for name, value in zip(("out", "dq", "dk", "dv"), (out[0], *(g[0].transpose(0, 1) for g in gradients))):
        torch.testing.assert_close(value.double(), want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backward_kv", ["refetch", "keep"])
def test_gradient_checkpointing(reentrant, backward_kv):
    layer, plan = Layer(), make_plan(20, 7, backward_kv=backward_kv)
    x = torch.randn(1, 27, 32, requires_grad=True)
    plain = step(layer, x, plan)
    again = step(layer, x, plan, lambda x, plan: checkpoint(layer, x, plan, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(plain, again))
    assert plan.stats.calls == {"forward": 3, "backward": 2}


def test_every_backward_uses_its_own_plan():
    """Two forwards before their backwards, in either order, and an evaluation between."""
    layer, plans = Layer(), [make_plan(9, 30), make_plan(39), make_plan(13, 13, 13)]
    x = torch.randn(1, 39, 32)
    want = [step(layer, x, plan)[1] for plan in plans[:2]]
    layer.zero_grad()
    outs = [layer(x, plan).sin().sum() for plan in plans[:2]]
    with torch.no_grad():
        layer(x, plans[2])
    for i in (1, 0):
        layer.zero_grad()
        outs[i].backward()
        assert torch.equal(layer.project.weight.grad, want[i])


def test_a_plan_lives_until_its_backward_and_no_longer():
    layer, plan = Layer(), make_plan(39)
    x = torch.randn(1, 39, 32)
    want = step(layer, x, plan)[1]
    handle, alive = plan.handle, weakref.ref(plan)
    layer.zero_grad()
    out = layer(x, handle)
    del plan
    gc.collect()
    assert alive() is find_plan(handle)
    out.sin().sum().backward()
    assert torch.equal(layer.project.weight.grad, want)
    del out
    gc.collect()
    assert alive() is None
    with pytest.raises(RuntimeError, match=f"no plan with handle {handle}"):
        layer(x, handle)


@pytest.mark.parametrize("backward_kv", ["refetch", "keep"])
def test_one_graph_for_many_plans(backward_kv):
    layer, counter = Layer(), CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for i in range(6):
        plan = make_plan(20 + 3 * i, 5 + i, backward_kv=backward_kv)
        x = torch.randn(1, 25 + 4 * i, 32)
        got = step(layer, x, plan.handle, compiled, backward_kv=backward_kv)
        assert all(torch.equal(a, b) for a, b in zip(got, step(layer, x, plan)))
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_compiled_backward_keeps_the_plan():
    layer = Layer()
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    x = torch.randn(1, 39, 32)
    plan = make_plan(39)
    want = step(layer, x, plan)[1]
    layer.zero_grad()
    out = compiled(x, plan.handle)
    del plan
    gc.collect()
    out.sin().sum().backward()
    torch.testing.assert_close(layer.project.weight.grad, want)
    torch._dynamo.reset()


def test_operators_pass_torchs_own_checks():
    plan = make_plan(11, 12)
    q, k, v = (torch.randn(1, heads, 23, 8, requires_grad=True) for heads in (4, 2, 2))
    tests = ("test_schema", "test_faketensor")
    for keep in (False, True):
        arguments = (q, k, v, None, plan.handle, -1, 0.3, 0.0, keep)
        torch.library.opcheck(torch.ops.hf_dcp.attention.default, arguments, test_utils=tests)


def test_plans_travel_as_batches_do():
    plan = make_plan(20, 7, backward_kv="keep", communicator=None)
    for copied in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):  # noqa: TID251
        assert copied.rank_plan.to_bytes() == plan.rank_plan.to_bytes()
        assert copied.backward_kv == "keep" and copied.handle != plan.handle
    assert plan.to("cpu") is plan and plan.to(torch.float32) is plan and plan.pin_memory() is plan
    assert plan.to("meta", non_blocking=True).device.type == "meta"
    assert repr(plan) == "DcpPlan(rank 0 of 1, 27 of 27 tokens)"


def test_repeated_calls_are_equal_to_the_bit():
    layer, plan, x = Layer(), make_plan(200, 31), torch.randn(1, 231, 32)
    first = step(layer, x, plan)
    assert all(torch.equal(a, b) for a, b in zip(first, step(layer, x, make_plan(200, 31))))


def test_output_that_is_not_used_has_zero_gradient():
    q, k, v = (torch.randn(1, heads, 23, 8, requires_grad=True) for heads in (4, 2, 2))
    attention(q, k, v, make_plan(11, 12)).mul(0).sum().backward()
    assert q.grad is not None and not q.grad.any()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"q": (1, 4, 22, 8)}, {}, "q has shape [1, 4, 22, 8], but the plan is for [1, 4, 23, 8]"),
        ({"k": (1, 4, 23, 8)}, {}, "k has shape"),
        ({}, {"window": 5}, "no part for sliding window 5"),
        ({}, {"window": 0}, "window must be at least 1"),
        ({}, {"softcap": 0.0}, "softcap must be above 0"),
        ({}, {"backward_kv": "both"}, "backward_kv must be refetch or keep"),
        ({"dtype": torch.bfloat16}, {}, "the plan is for fp32: plan with that dtype"),
    ],
)
def test_wrong_arguments(change, options, message):
    shapes = {"q": (1, 4, 23, 8), "k": (1, 2, 23, 8), "v": (1, 2, 23, 8)} | change
    dtype = shapes.pop("dtype", torch.float32)
    with pytest.raises(ValueError) as error:
        attention(*(torch.randn(shape, dtype=dtype) for shape in shapes.values()), make_plan(11, 12), **options)
    assert message in str(error.value)


def test_plan_without_its_group():
    plan = plan_batch(BatchSpec([40], causal()), Topology((0, 0)), SHAPE, DcpConfig(block_size=16)).rank(0)
    rows = max(plan.num_local, 1)
    q, k, v = (torch.randn(1, heads, rows, 8) for heads in (4, 2, 2))
    with pytest.raises(RuntimeError, match=r"make one with Communicator.create\(\)"):
        attention(q, k, v, DcpPlan(plan))
    with pytest.raises(RuntimeError, match="no communicator 77"):
        attention(q, k, v, DcpPlan(plan, communicator=77))
    with pytest.raises(ValueError, match="backward_kv must be"):
        DcpPlan(plan, backward_kv="neither")


def test_memory_is_not_quadratic():
    """Masks are of small triangles only: together they stay far below tokens x tokens."""
    plan = plan_batch(BatchSpec([4096], causal()), Topology((0,)), SHAPE, DcpConfig(block_size=1024)).rank(0)
    dcp_plan = DcpPlan(plan)
    q, k, v = (torch.randn(1, heads, 4096, 8) for heads in (4, 2, 2))
    attention(q, k, v, dcp_plan)
    masks = dcp_plan.executor.masks._masks.values()
    assert sum(mask.additive.numel() for mask in masks) < 4096 * 64
    assert np.isfinite(sum(float(mask.additive.max()) for mask in masks))
