"""Bytes of the static schemes: the published figures, the closed form, and what the rank plans send are the same."""

from __future__ import annotations

import pytest

from hf_dcp.config import DcpConfig
from hf_dcp.masks import causal, lambda_mask
from hf_dcp.planning.batch import BatchSpec, ModelShape, RowBytes, Topology
from hf_dcp.planning.plan import Message
from hf_dcp.planning.simulate import message_bytes
from hf_dcp.planning.static import SCHEMES, StaticPlan, dense_bytes, plan_static

SHAPE = ModelShape(8, 2, 128, "bf16")
PUBLISHED = {
    # MB forward between nodes and in total, backward between nodes and in total; 131,072 tokens on 4 nodes x 8 devices
    "ring": (520, 4161, 1057, 8456),
    "zigzag": (520, 4161, 1057, 8456),
    "head-ring": (503, 2349, 1040, 4496),
    "loongtrain": (403, 2349, 940, 4496),
}


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("lengths", [[131072], [32768] * 4, [2048] * 64], ids=len)
def test_published_figures(name: str, lengths: list[int]) -> None:
    found = dense_bytes(name, BatchSpec(lengths, causal()), Topology.grid(4, 8), SHAPE)
    forward, backward = found["forward"], found["backward"]
    figures = []
    for part in (forward, backward):
        figures += [part["inter_node_bytes"], part["inter_node_bytes"] + part["intra_node_bytes"]]
    assert tuple(round(value / 1e6) for value in figures) == PUBLISHED[name]


def counted(plan: StaticPlan, topology: Topology, which: str) -> dict[str, int]:
    """Bytes of the rank plans' messages."""
    inter, intra, devices = 0, 0, [0]
    for rank_plan in plan.rank_plans:
        row = RowBytes.of(rank_plan.shape, rank_plan.head_groups, rank_plan.reduce_dtype)
        part = rank_plan.windows[0].forward if which == "forward" else rank_plan.windows[0].backward
        size = message_bytes(part, row, which)
        sent = part.messages[:, Message.INCOMING] == 0
        foreign = topology.node[part.messages[:, Message.PEER]] != topology.node[rank_plan.rank]
        inter, intra = inter + int(size[sent & foreign].sum()), intra + int(size[sent & ~foreign].sum())
        devices.append(int(size.sum()))
    return {"inter_node_bytes": inter, "intra_node_bytes": intra, "max_device_bytes": max(devices)}


CASES = [
    ("ring", Topology.grid(4, 8), SHAPE, None),
    ("zigzag", Topology.grid(4, 8), SHAPE, "fp32"),
    ("head-ring", Topology.grid(4, 8), SHAPE, None),
    ("loongtrain", Topology.grid(4, 8), SHAPE, None),
    ("loongtrain", Topology.grid(2, 8), ModelShape(8, 4, 4, "fp32"), None),
    ("head-ring", Topology.grid(4, 1), SHAPE, "fp32"),
    ("loongtrain", Topology.grid(4, 1), SHAPE, None),
    ("head-ring", Topology.grid(1, 2), SHAPE, None),
    ("zigzag", Topology((0, 1, 0, 1, 1)), ModelShape(3, 3, 4, "fp32"), None),
    ("head-ring", Topology((0, 1, 0, 1, 1, 0)), ModelShape(6, 3, 4, "bf16"), None),
    ("ring", Topology((0,)), SHAPE, None),
]


@pytest.mark.parametrize(("name", "topology", "shape", "reduce_dtype"), CASES)
def test_rank_plans_send_the_closed_form(
    name: str, topology: Topology, shape: ModelShape, reduce_dtype: str | None
) -> None:
    batch = BatchSpec([300, 64, 1, 77], lambda_mask(2, 30))
    plan = plan_static(name, batch, topology, shape, DcpConfig(reduce_dtype=reduce_dtype))
    closed = dense_bytes(name, batch, topology, shape, reduce_dtype, executed=True)
    for which, expected in closed.items():
        assert counted(plan, topology, which) == expected


def test_the_published_programs_send_no_more_than_ours() -> None:
    batch, topology = BatchSpec([4096], causal()), Topology.grid(4, 8)
    for name in SCHEMES:
        published, ours = (dense_bytes(name, batch, topology, SHAPE, executed=x) for x in (False, True))
        heads = SCHEMES[name].heads
        row = RowBytes.of(SHAPE, 2)
        swapped = 4096 * heads  # every token of one group goes to the other member of the team
        extra = {"forward": row.stat, "backward": row.q + row.kv + 2 * row.stat, "backward_keep": 2 * row.stat}
        for which, size in extra.items():
            totals = [x[which]["inter_node_bytes"] + x[which]["intra_node_bytes"] for x in (published, ours)]
            assert totals[1] - totals[0] == swapped * size


def test_the_mask_does_not_matter() -> None:
    topology = Topology.grid(2, 2)
    found = []
    for mask in (causal(), lambda_mask(0, 1)):
        plan = plan_static("zigzag", BatchSpec([512], mask), topology, SHAPE)
        found.append([counted(plan, topology, which) for which in ("forward", "backward")])
    assert found[0] == found[1]


def test_loongtrain_pads_to_the_longest() -> None:
    topology = Topology.grid(2, 2)
    mixed, equal = (
        dense_bytes("loongtrain", BatchSpec(lengths, causal()), topology, SHAPE)
        for lengths in ([1000, 8, 8, 8], [1000] * 4)
    )
    assert mixed == equal
    assert (
        mixed["forward"]["inter_node_bytes"]
        > dense_bytes("head-ring", BatchSpec([1000, 8, 8, 8], causal()), topology, SHAPE)["forward"]["inter_node_bytes"]
        * 3
    )
