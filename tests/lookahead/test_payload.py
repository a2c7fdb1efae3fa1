"""Payloads in a plan store: what is not whole, not of this run, or not for this rank is refused, and nothing is executed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dcp.lookahead import planning
from hf_dcp.lookahead.payload import PayloadError, PlanningFailed, decode, encode_error, encode_plan
from hf_dcp.lookahead.report import PlanReport
from hf_dcp.planning.batch import Topology
from hf_dcp.planning.planner import plan_batch
from tests.lookahead.test_planning import CONFIG, SHAPE, batch, sources

KEY = bytes(range(32))


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
