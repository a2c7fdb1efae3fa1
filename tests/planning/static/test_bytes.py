"""Bytes of the static schemes: the published figures, the closed form, and what the rank plans send are the same."""

from __future__ import annotations

import json
from pathlib import Path

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


def in_mb(found: dict[str, dict[str, int]], which: str) -> tuple[int, int]:
    """(between nodes, in total), in MB."""
    inter, intra = found[which]["inter_node_bytes"], found[which]["intra_node_bytes"]
    return round(inter / 1e6), round((inter + intra) / 1e6)


def test_published_figures_of_mixed_lengths() -> None:
    """33 sequences, the longest of 17,725 tokens: padding to the chunks costs up to 1 %, padding to the longest much."""
    file = Path(__file__).parents[3] / "benchmarks" / "data" / "reference_batches.json"
    (lengths,) = (b for name, b in json.loads(file.read_text())["batches"].items() if name.startswith("c"))
    assert len(lengths) == 33 and max(lengths) == 17725
    for name in ("ring", "zigzag", "head-ring"):
        found = dense_bytes(name, BatchSpec(lengths, causal()), Topology.grid(4, 8), SHAPE)
        figures = [*in_mb(found, "forward"), *in_mb(found, "backward")]
        assert all(1 <= a / b < 1.01 for a, b in zip(figures, PUBLISHED[name]))
    padded = dense_bytes("loongtrain", BatchSpec(lengths, causal()), Topology.grid(4, 8), SHAPE)
    assert in_mb(padded, "forward") == (1797, 10484)  # 33 times 17,728 tokens


@pytest.mark.parametrize(("inner", "crossing"), [(1, 3.75), (2, 3.5), (4, 3), (8, 4.5), (16, 3.75)])
def test_inner_rings(inner: int, crossing: float) -> None:
    """16 positions, four to a node. KV makes 15 hops; how many of them leave a node, in the mean over positions, depends
    on the inner ring: of the hops inside an inner ring of 8, a quarter; of those from ring to ring, all or every other."""
    topology, batch = Topology.grid(4, 8), BatchSpec([131072], causal())
    found = dense_bytes("loongtrain", batch, topology, SHAPE, inner=inner)["forward"]
    row = 2 * 2 * 128 * 2  # K and V of two KV heads
    assert found["inter_node_bytes"] == crossing * 131072 * row
    assert in_mb({"forward": found}, "forward")[1] == 2349


@pytest.mark.parametrize("inner", [1, 2, 4])
def test_rank_plans_of_any_inner_ring(inner: int) -> None:
    topology, batch = Topology.grid(2, 4), BatchSpec([64, 5], causal())
    plan = plan_static("loongtrain", batch, topology, SHAPE, inner=inner)
    plan.check()
    closed = dense_bytes("loongtrain", batch, topology, SHAPE, inner=inner, executed=True)
    for which, expected in closed.items():
        assert counted(plan, topology, which) == expected


def test_inner_rings_that_do_not_fit() -> None:
    batch = BatchSpec([64], causal())
    with pytest.raises(ValueError, match="inner must divide the 16 positions"):
        dense_bytes("loongtrain", batch, Topology.grid(4, 8), SHAPE, inner=3)
    with pytest.raises(ValueError, match="inner must be None for a simple ring"):
        dense_bytes("zigzag", batch, Topology.grid(4, 8), SHAPE, inner=4)


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
