"""The score of a placement against brute force, row by row, and against what rank plans say they send."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dcp import masks
from hf_dcp.config import DcpConfig
from hf_dcp.planning import BatchSpec, ModelShape, Plan, Topology, plan_batch
from hf_dcp.planning.batch import RowBytes
from hf_dcp.planning.limits import lpt_bound
from hf_dcp.planning.objective import evaluate
from hf_dcp.planning.plan import Message
from hf_dcp.planning.problem import KV_SIDE, Q_SIDE, Placement, build_problem
from hf_dcp.planning.simulate import message_bytes
from hf_dcp.planning.tiles import make_blocks, make_tiles
from tests.planning.rule import PASSES, expected_bytes
from tests.planning.solvers import random_solver
from tests.planning.strategies import batches, dense_mask, shapes, topologies


@st.composite
def random_plans(draw: st.DrawFn) -> Plan:
    """A batch under a random placement, with any head groups, types and block size."""
    shape = draw(shapes)
    groups = draw(st.sampled_from([g for g in (1, 2) if shape.kv_heads % g == 0]))
    config = DcpConfig(
        block_size=draw(st.integers(1, 12)),
        head_groups=groups,
        reduce_dtype=draw(st.sampled_from([None, "fp32"])),
        backward_kv=draw(st.sampled_from(["refetch", "keep"])),
    )
    batch, topology = draw(batches(max_length=24, max_sequences=3)), draw(topologies)
    return plan_batch(batch, topology, shape, config, solver=random_solver(draw(st.integers(0, 2**31))))


@settings(max_examples=60, deadline=None)
@given(random_plans())
def test_bytes_are_those_of_the_rules_row_by_row(plan: Plan) -> None:
    totals = []
    for which in PASSES:
        by_window = [np.array(expected_bytes(plan, window, which)) * n for window, n in plan.shape.windows]
        inter, intra = np.sum(by_window, 0).tolist()
        found = plan.score.passes[which]
        assert (found.inter_node, found.intra_node) == (inter, intra)
        totals.append(plan.topology.inter_cost * inter + plan.topology.intra_cost * intra)
    assert plan.score.cost == totals[0] + totals[1 if plan.config.backward_kv == "refetch" else 2]


@settings(max_examples=40, deadline=None)
@given(random_plans())
def test_the_busiest_device_is_that_of_the_rank_plans(plan: Plan) -> None:
    row = RowBytes.of(plan.shape, plan.head_groups, plan.config.reduce_dtype)
    for which in PASSES:
        moved = np.zeros(plan.topology.world_size, np.int64)
        for rank_plan in plan.rank_plans:
            for part, (_, layers) in zip(rank_plan.windows, plan.shape.windows, strict=True):
                program = part.forward if which == "forward" else part.backward
                moved[rank_plan.rank] += layers * message_bytes(program, row, which).sum()
                assert program.messages.shape[1] == len(Message)
        assert plan.score.passes[which].max_device == moved.max()


@settings(max_examples=40, deadline=None)
@given(random_plans())
def test_balance_counts_every_attended_element_and_every_device(plan: Plan) -> None:
    world, heads = plan.topology.world_size, plan.shape.heads // plan.head_groups
    work = np.zeros(world)
    for tiles, device, (window, layers) in zip(plan.tiles, plan.placement.tile_device, plan.shape.windows, strict=True):
        mask = dense_mask(plan.batch, window)
        for q, kv, on in zip(tiles.q, tiles.kv, device, strict=True):
            (a, b), (m, n) = plan.blocks.start[[q, kv]], plan.blocks.size[[q, kv]]
            np.add.at(work, on, mask[a : a + m, b : b + n].sum() * heads * layers)
    tokens = np.bincount(plan.placement.block_device, weights=plan.blocks.size, minlength=world)
    assert plan.score.token_imbalance == pytest.approx(tokens.max() / tokens.mean())
    assert plan.score.compute_imbalance == pytest.approx(work.max() / work.mean() if work.any() else 1.0)
    above = work.max() > plan.score.limits["compute"] * work.mean() * (1 + 1e-9)
    above |= tokens.max() > plan.score.limits["tokens"] * tokens.mean() * (1 + 1e-9)
    assert (plan.score.status == "unbalanced") == (plan.score.excess > 0) == bool(above)


def test_the_hypergraph_of_the_papers_example() -> None:
    """Figure 9: six tokens in blocks of two, a question and two answers: five tiles, nine nets. Q and O of a block share
    owner and tiles, so that here they are one net: six, of which three count twice."""
    batch = BatchSpec([6], masks.shared_question(2, [2, 2]))
    blocks = make_blocks(batch, 2)
    shape, config = ModelShape(1, 1, 8, "bf16"), DcpConfig(head_groups=1)
    problem = build_problem(batch, blocks, [make_tiles(batch, blocks)], shape, 1, config, Topology.grid(1, 2))
    assert list(zip(problem.tile_q, problem.tile_kv, strict=True)) == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 2)]
    assert problem.tile_work.tolist() == [3, 4, 3, 4, 3]
    links = problem.atom_tiles
    nets = {
        (int(side), int(block)): links.member[links.ptr[a] : links.ptr[a + 1]].tolist()
        for a, (side, block) in enumerate(zip(problem.atom_side, problem.atom_block, strict=True))
    }
    assert nets == {
        (Q_SIDE, 0): [0], (Q_SIDE, 1): [1, 2], (Q_SIDE, 2): [3, 4],
        (KV_SIDE, 0): [0, 1, 3], (KV_SIDE, 1): [2], (KV_SIDE, 2): [4],
    }  # fmt: skip
    assert sum(2 if side == Q_SIDE else 1 for side, _ in nets) == 9
    # The question on device 0, an answer on each: KV of the question travels once, nothing else.
    owner = np.array([0, 0, 1], np.int32)
    score = evaluate(problem, Placement("example", owner, (owner[problem.tile_q][:, None],)))
    assert score.passes["forward"].intra_node == 2 * 2 * 8 * 2


def test_limits_are_those_of_the_settings_or_the_best_that_pieces_permit() -> None:
    shape, topology = ModelShape(2, 1, 8), Topology.grid(1, 4)

    def limits(length: int, **settings: object):
        batch = BatchSpec([length], masks.full())
        blocks = make_blocks(batch, 1)
        config = DcpConfig(**settings)
        return build_problem(batch, blocks, [make_tiles(batch, blocks)], shape, 1, config, topology).limits

    fine = limits(40)
    assert fine.possible and fine.status == "ok"
    assert fine.tokens == int(10 * 1.05) and fine.compute == int(1600 * 2 / 4 * 1.1)
    coarse = limits(5)  # one device must hold two of five tokens
    assert not coarse.possible and coarse.tokens == 2
    wide = limits(40, epsilon_inter=0.4)
    assert wide.compute == int(800 * (1 + 0.4) * (1 + 0.1))


def test_lpt_bound() -> None:
    assert lpt_bound(np.array([5, 4, 3, 3, 3]), 1, 2, 0) == 10  # the textbook case: the best is 9
    assert lpt_bound(np.array([7]), 4, 2, 0) == 14
    assert lpt_bound(np.array([1, 1]), 1, 8, 100) == 100  # clear without dealing
