"""Who plans, who fetches, and what happens if a plan doesn't come."""

from __future__ import annotations

import functools
import multiprocessing
import pickle
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_dcp
from hf_dcp.lookahead import planning
from hf_dcp.lookahead import settings as plan_settings
from hf_dcp.lookahead.payload import PayloadError, PlanningFailed, decode, encode_error, encode_plan
from hf_dcp.lookahead.planning import PlanSettings, PlanSource, plan_key
from hf_dcp.lookahead.report import PlanReport
from hf_dcp.lookahead.shelf import name_of
from hf_dcp.lookahead.store import LocalStore, StoreAddress, StoreError, StoreTimeout, TorchStore
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.planner import plan_batch

SHAPE = ModelShape(4, 2, 8, "fp32", ((None, 3), (5, 2)))
CONFIG = hf_dcp.DcpConfig(block_size=8)
KEY = bytes(range(32))


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


@functools.cache
def _payload() -> tuple[Any, PlanReport, bytes]:
    plan = plan_batch(batch(20, 7), Topology.grid(1, 2), SHAPE, CONFIG)
    report = PlanReport.of(plan)
    return plan.rank(1), report, encode_plan(KEY, plan.rank(1), report)


def test_payload_round_trip() -> None:
    rank_plan, report, data = _payload()
    got = decode(KEY, data)
    assert got.report == report and got.rank_plan.to_bytes() == rank_plan.to_bytes()
    with pytest.raises(PlanningFailed, match="ValueError: too long"):
        decode(KEY, encode_error(KEY, "ValueError: too long"))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda d: b"", "has 0 bytes"),
        (lambda d: d[:40], "has 40 bytes"),
        (lambda d: d[:-1], "where its frame says"),
        (lambda d: d + b"x", "where its frame says"),
        (lambda d: b"pickle" + d[6:], "begins with"),
        (lambda d: d[:8] + b"\x63\0\0\0" + d[12:], "schema version 99"),
        (lambda d: d[:16] + bytes(32) + d[48:], "is for batch 0000"),
        (lambda d: d[:48] + b"\xff" * 8 + d[56:], "where its frame says 18446744073709551615"),
        (lambda d: d[:200] + bytes([d[200] ^ 1]) + d[201:], "checksum is wrong"),
        (lambda d: d[:12] + b"\x07\0\0\0" + d[16:], "unknown kind 7"),
    ],
)
def test_damaged_payloads_are_refused(damage: Any, text: str) -> None:
    with pytest.raises(PayloadError, match=text):
        decode(KEY, damage(_payload()[2]))


def test_hostile_insides_are_refused() -> None:
    from hf_dcp.lookahead.payload import _frame, _Kind

    plan = _payload()[0].to_bytes()
    report = _payload()[1].to_json().encode()
    for body in (
        b"\xff\xff\xff\xff" + report,
        len(report).to_bytes(4, "little") + report,
        len(report).to_bytes(4, "little") + report + b"\xff" * 8 + plan[8:],
        (2).to_bytes(4, "little") + b"[]" + plan,
        (20000).to_bytes(4, "little") + b"[" * 20000 + plan,
    ):
        with pytest.raises(PayloadError, match="can't be read"):
            decode(KEY, _frame(KEY, _Kind.PLAN, body))


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


def test_a_forged_payload_is_refused() -> None:
    """Right in all but the secret, which the store doesn't hold; and the metadata of a plan is never more than data."""
    rank_plan, report, _ = _payload()
    with pytest.raises(PayloadError, match="checksum is wrong: it is damaged, or not of this run"):
        decode(KEY, encode_plan(KEY, rank_plan, report, b"another run's"), b"ours")
    with pytest.raises(PayloadError, match="checksum is wrong"):
        decode(KEY, encode_error(KEY, "stop!"), b"ours")
    assert decode(KEY, encode_plan(KEY, rank_plan, report, b"ours"), b"ours").report == report


@pytest.mark.parametrize(
    "evil",
    [
        "/etc/passwd",
        "__import__('os').system('touch evil')",
        "!!python/object/apply:os.system ['touch evil']",
        "../../x",
    ],
)
@pytest.mark.parametrize("name", ["dtype", "reduce_dtype", "windows", "rank", "heads", "node_of_rank"])
def test_paths_and_code_in_metadata_are_data(
    name: str, evil: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even with the right checksum: refused, or refused when it is compared with what this rank is."""
    from hf_dcp.lookahead.payload import _frame, _Kind
    from hf_dcp.planning import codec

    monkeypatch.chdir(tmp_path)
    rank_plan, report, _ = _payload()
    header = codec._header(rank_plan)
    with monkeypatch.context() as patch:
        patch.setattr(codec, "_header", lambda plan: header | {name: evil})
        body = rank_plan.to_bytes()
    text = report.to_json().encode()
    data = _frame(KEY, _Kind.PLAN, len(text).to_bytes(4, "little") + text + body)
    with pytest.raises(PayloadError):
        planning._check(decode(KEY, data), sources(2, "metadata")[1].settings)
    assert not list(tmp_path.iterdir())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_damage_is_refused(data: st.DataObject) -> None:
    whole = _payload()[2]
    kind = data.draw(st.sampled_from(["cut", "flip", "longer", "shuffled"]))
    at = data.draw(st.integers(0, len(whole) - 1))
    if kind == "cut":
        damaged = whole[:at]
    elif kind == "flip":
        damaged = whole[:at] + bytes([whole[at] ^ (1 << data.draw(st.integers(0, 7)))]) + whole[at + 1 :]
    elif kind == "longer":
        damaged = whole + data.draw(st.binary(min_size=1, max_size=50))
    else:
        damaged = whole[at:] + whole[:at]
        if damaged == whole:
            return
    with pytest.raises(PayloadError):
        decode(KEY, damaged)
