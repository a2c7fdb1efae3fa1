"""Who plans, who fetches, and what happens if a plan doesn't come."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import hf_dcp
from hf_dcp.lookahead import planning
from hf_dcp.lookahead import settings as plan_settings
from hf_dcp.lookahead.payload import encode_plan
from hf_dcp.lookahead.planning import PlanSettings, PlanSource, plan_key
from hf_dcp.lookahead.report import PlanReport
from hf_dcp.lookahead.shelf import name_of
from hf_dcp.lookahead.store import LocalStore, StoreAddress, StoreError, StoreTimeout, TorchStore
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.planner import plan_batch

SHAPE = ModelShape(4, 2, 8, "fp32", ((None, 3), (5, 2)))
CONFIG = hf_dcp.DcpConfig(block_size=8)


def sources(world: int, prefix: str, **options: Any) -> list[PlanSource]:
    topology = Topology(tuple(rank // 2 for rank in range(world)))
    address = StoreAddress("local", prefix)
    common = {"topology": topology, "shape": SHAPE, "config": CONFIG, "communicator": None, "address": address}
    return [PlanSource(PlanSettings(rank=rank, **(common | options))) for rank in range(world)]


def batch(*lengths: int) -> BatchSpec:
    return BatchSpec(lengths, hf_dcp.causal())


def together(group: list[PlanSource], *specs: BatchSpec) -> list[list[Any]]:
    """Every source asks for all batches, at the same time."""
    results: list[Any] = [None] * len(group)

    def ask(i: int) -> None:
        try:
            results[i] = [group[i].get(spec) for spec in specs]
        except ValueError as error:
            results[i] = error

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(group))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_each_batch_is_planned_once_in_the_group() -> None:
    group = sources(4, "once", timeout=30.0)
    specs = [batch(30, i + 1) for i in range(12)]
    plans = together(group, *specs)
    total = sum((source.counts for source in group), Counter())
    assert (total["planned"], total["fetched"], total["replanned"]) == (12, 36, 0)
    assert sum(source.counts["planned"] > 0 for source in group) >= 3  # spread over the ranks
    for i, spec in enumerate(specs):
        alone = plan_batch(spec, group[0].settings.topology, SHAPE, CONFIG)
        for rank in range(4):
            assert plans[rank][i].rank_plan.to_bytes() == alone.rank(rank).to_bytes()
            assert plans[rank][i].report.tokens == 31 + i


def test_batches_seen_before_come_from_the_cache() -> None:
    group = sources(2, "cache", timeout=30.0, cache_size=2)
    a, b, c = batch(9), batch(10), batch(11)
    origins = [[plan.origin for plan in plans] for plans in together(group, a, a, b, c, a)]
    for own in origins:
        assert own[1] == "cached" and "cached" not in (own[0], own[2], own[3], own[4])
    # One rank has forgotten a plan, the one that made it has not: it is put there anew.
    group = sources(2, "forgotten", timeout=30.0, keep=1)
    together(group, a, b, c)
    for source in group:
        if source.planner_of(plan_key(a, source.settings)) != source.settings.rank:
            source._cache.clear()
    assert all(plans[0].origin in ("cached", "fetched") for plans in together(group, a))


def test_plans_that_do_not_come_are_made_here() -> None:
    group = sources(2, "late", timeout=0.05)
    spec = batch(17, 3)
    other = next(s for s in group if s.planner_of(plan_key(spec, s.settings)) != s.settings.rank)
    plan = other.get(spec)
    assert plan.origin == "replanned"
    want = plan_batch(spec, other.settings.topology, SHAPE, CONFIG).rank(other.settings.rank)
    assert plan.rank_plan.to_bytes() == want.to_bytes()


def test_an_error_of_the_planner_reaches_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "plan_batch", _fail)
    group = sources(3, "error", timeout=30.0)
    for error in together(group, batch(5, 6)):
        assert isinstance(error, ValueError) and "no plan for (5, 6)" in str(error)


def _fail(spec: BatchSpec, *args: Any) -> Any:
    raise ValueError(f"no plan for {spec.lengths}")


def test_old_plans_leave_the_store() -> None:
    group = sources(2, "growth", timeout=30.0, keep=3)
    together(group, *[batch(n) for n in range(1, 40)])
    assert len(LocalStore._values["growth"]) <= 2 * 3


def test_a_bad_payload_costs_a_replan() -> None:
    group = sources(2, "bad", timeout=5.0)
    spec = batch(13, 4)
    key = plan_key(spec, group[0].settings)
    other = next(s for s in group if s.planner_of(key) != s.settings.rank)
    elsewhere = plan_batch(spec, Topology.grid(1, 2), ModelShape(8, 8, 8, "fp32"), CONFIG)
    wrong = encode_plan(key, elsewhere.rank(other.settings.rank), PlanReport.of(elsewhere))
    for data in (b"garbage", wrong):
        LocalStore("bad").put(name_of(key, other.settings.rank), data)
        other._cache.clear()
        assert other.get(spec).origin == "replanned"
    assert other.counts["refused"] == 2


def test_key_depends_on_all_that_a_plan_does(monkeypatch: pytest.MonkeyPatch) -> None:
    base = sources(2, "key")[0].settings
    spec = batch(8, 9)
    changed = [
        plan_key(batch(9, 8), base),
        plan_key(BatchSpec((8, 9), hf_dcp.full()), base),
        plan_key(spec, sources(4, "key")[0].settings),
        plan_key(spec, sources(2, "key", shape=ModelShape(4, 4, 8))[0].settings),
        plan_key(spec, sources(2, "key", config=hf_dcp.DcpConfig(block_size=8, seed=1))[0].settings),
    ]
    same = plan_key(spec, sources(2, "other prefix")[1].settings)
    monkeypatch.setattr(plan_settings, "versions", lambda: {"hf-dcp": "another"})
    changed.append(plan_key(spec, base))
    monkeypatch.undo()
    assert plan_key(spec, base) == same
    assert len({same, *changed}) == 1 + len(changed)


def test_report_counts_what_is_sent_and_received() -> None:
    plan = plan_batch(batch(64, 9, 30), Topology((0, 0, 1)), SHAPE, CONFIG)
    report = PlanReport.of(plan)
    # Counted a second time, run by run, and on the side of the receivers.
    from hf_dcp.planning.batch import RowBytes
    from hf_dcp.planning.plan import Message

    total: Counter[tuple[str, bool]] = Counter()
    for rank_plan in plan.rank_plans:
        size = RowBytes.of(SHAPE, rank_plan.head_groups, rank_plan.reduce_dtype)
        for part, (_, layers) in zip(rank_plan.windows, SHAPE.windows):
            for which, program in part.passes():
                for message in program.messages:
                    if not message[Message.INCOMING]:
                        continue
                    q_rows = sum(n for _, n in program.q_runs[message[Message.Q_BEGIN] : message[Message.Q_END]])
                    kv_rows = sum(n for _, n in program.kv_runs[message[Message.KV_BEGIN] : message[Message.KV_END]])
                    q, kv = (size.partials if message[Message.PARTIAL] else size.inputs)(which)
                    far = rank_plan.node_of_rank[message[Message.PEER]] != rank_plan.node_of_rank[rank_plan.rank]
                    total[which, far] += int(layers * (q_rows * q + kv_rows * kv))
    assert report.forward_inter_bytes == total["forward", True] > 0
    assert report.forward_intra_bytes == total["forward", False]
    assert report.backward_inter_bytes == total["backward", True]
    assert report.backward_intra_bytes == total["backward", False]
    # 103 tokens of 2 KV heads of 8 elements in fp32, 5 layers: two passes of KV, one of dKV.
    row = 2 * 2 * 8 * 4
    assert report.ring_bytes == 5 * 103 * (2 * 2 * row + 3 * row)
    assert PlanReport.from_json(report.to_json()) == report
    with pytest.raises(ValueError):
        PlanReport.from_json(report.to_json().replace('"tokens": 103', '"tokens": "103"'))


@pytest.fixture(scope="module")
def server() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_torch_store(server: Any) -> None:
    store = TorchStore("127.0.0.1", server.port, "run", timeout=5.0)
    large = np.random.default_rng(0).bytes(9 << 20)
    for value in (b"", b"small", large):
        store.put("key", value)
        assert store.get("key", 5.0) == value
    assert TorchStore("127.0.0.1", server.port, "run").get("key", 5.0) == large
    with pytest.raises(StoreTimeout):
        TorchStore("127.0.0.1", server.port, "another run").get("key", 0.1)
    before = server.num_keys()
    store.delete("key")
    assert server.num_keys() == before - 3
    store.delete("key")
    with pytest.raises(StoreTimeout):
        store.get("key", 0.1)
    server.set("run/key", (10**6).to_bytes(4, "little"))
    with pytest.raises(StoreError, match="1000000 chunks"):
        store.get("key", 1.0)


def test_no_server_is_an_error() -> None:
    with pytest.raises(StoreError):
        TorchStore("127.0.0.1", 1, "run", timeout=0.5)


def test_sources_work_on_in_forks_and_through_pickles(server: Any) -> None:
    address = StoreAddress("torch", "forks", "127.0.0.1", server.port)
    group = sources(2, "", address=address, timeout=20.0)
    specs = [batch(n, 2) for n in range(3, 9)]
    here = [group[0].get(spec) for spec in specs[:1] if group[0].planner_of(plan_key(spec, group[0].settings)) == 0]
    queue = multiprocessing.get_context("fork").Queue()
    copies = [group[0], pickle.loads(pickle.dumps(group[1]))]  # noqa: TID251
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_ask, args=(source, specs, queue), daemon=True) for source in copies]
    for worker in workers:
        worker.start()
    answers = dict(queue.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join(10)
    assert answers[0] == answers[1] and len(answers[0]) == len(specs)
    assert all(plan.rank_plan.digest == answers[0][0] for plan in here)


def _ask(source: PlanSource, specs: list[BatchSpec], queue: Any) -> None:
    queue.put((source.settings.rank, [source.get(spec).rank_plan.digest for spec in specs]))
