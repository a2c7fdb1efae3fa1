"""The attention benchmark on ranks of this machine: what it reports fits together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from hf_dcp.bench.attention import Settings, bench_attention
from hf_dcp.bench.contestants import NAMES, check_names, compute_only, exchange_only, make_rank_plans
from hf_dcp.bench.group import Group
from hf_dcp.bench.spans import PARTS
from hf_dcp.cli.main import run
from hf_dcp.config import DcpConfig
from hf_dcp.masks import causal
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.plan import PASSES, Op
from hf_dcp.planning.static import dense_bytes
from tests.multiprocess import run_ranks

SHAPE = ModelShape(4, 2, 16, "fp32")
LENGTHS = [200, 40, 16]
SETTINGS = Settings(("dcp", "zigzag-dense", "head-ring-dense", "zigzag"), SHAPE, DcpConfig(), 2, 1, tracing=True)


def measured(backward_kv: str) -> Any:
    group = Group.join(nodes=2)
    settings = replace(SETTINGS, config=DcpConfig(backward_kv=backward_kv))  # type: ignore[arg-type]
    try:
        return bench_attention([("one", LENGTHS)], ["causal"], settings, group)
    finally:
        group.leave()


@pytest.mark.parametrize("backward_kv", ["refetch", pytest.param("keep", marks=pytest.mark.slow)])
def test_two_ranks(backward_kv: str) -> None:
    answers = run_ranks(measured, 2, backward_kv)
    assert answers[0] == answers[1]
    report, events = answers[0]
    assert report["node_of_rank"] == [0, 1]
    (result,) = report["results"]
    assert set(result["plans"]) == set(SETTINGS.names)
    for name, plan in result["plans"].items():
        for which in PASSES:
            _check_pass(plan[which])
        if name.endswith("-dense"):
            closed = dense_bytes(
                name.removesuffix("-dense"), BatchSpec(LENGTHS, causal()), Topology.grid(2, 1), SHAPE, executed=True
            )
            for which, key in (("forward", "forward"), ("backward", f"backward{'_keep' * (backward_kv == 'keep')}")):
                assert plan[which]["bytes_sent"]["inter"] == closed[key]["inter_node_bytes"]
                assert plan[which]["max_device_bytes"] == closed[key]["max_device_bytes"]
    assert set(result["speedups"]) == {"dense", "row_exact"}
    assert result["speedups"]["dense"]["total"]["ceiling"] > 0
    assert report["summary"][0]["batches"] == 1
    assert {event["pid"] for event in events} == {0, 1}
    assert {event["args"]["plan"] for event in events if event["ph"] == "X"} == set(SETTINGS.names)


def _check_pass(one: dict[str, Any]) -> None:
    assert one["bytes_sent"] == one["bytes_planned"]
    assert one["bytes_sent"]["intra"] == 0
    assert len(one["seconds_each"]) == SETTINGS.repeats
    assert all(one[key] > 0 for key in ("seconds", "compute_s", "exchange_s"))
    parts = one["decomposition"]
    assert parts["attention_s"] > 0 and parts["overlapped_s"] <= parts["attention_s"]
    assert sum(parts[name] for name in PARTS) <= 1.001 * max(one["seconds_each"])


def test_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    names = "dcp,sdpa,zigzag-dense"
    shape = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
    arguments = ["--lengths", "65,20", "--placements", names, "--repeats", "1", "--trace", str(file), *shape]
    assert run(["bench", "attention", *arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    plans = report["results"][0]["plans"]
    assert list(plans) == ["dcp", "zigzag-dense", "sdpa"]
    assert plans["dcp"]["forward"]["bytes_sent"] == {"inter": 0, "intra": 0}
    assert json.loads(file.read_text())["traceEvents"]
    assert run(["bench", "attention", *arguments]) == 0
    assert "dcp over zigzag-dense" in capsys.readouterr().out


WRONG = {
    "no lengths": ([], "give either --lengths"),
    "lengths": (["--lengths", "8,x"], "--lengths must be integers"),
    "placement": (["--lengths", "8", "--placements", "dcp,best"], "not 'best'"),
    "placement twice": (["--lengths", "8", "--placements", "dcp,dcp"], "each once"),
    "nodes": (["--lengths", "8", "--nodes", "2"], "--nodes must divide the number of processes, 1"),
    "repeats": (["--lengths", "8", "--repeats", "0"], "--repeats"),
    "device": (["--lengths", "8", "--device", "tpu"], "--device must be cpu or cuda"),
    "trace": (["--lengths", "8", "--trace", "/nowhere/at/all.json"], "--trace"),
    "mask": (["--lengths", "8", "--mask", "casual"], "unknown mask"),
    "backward": (["--lengths", "8", "--backward-kv", "drop"], "backward_kv"),
    "heads": (["--lengths", "8", "--kv-heads", "3"], "kv_heads"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, expected = WRONG[name]
    assert run(["bench", "attention", *arguments, "--json"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines()[-1].startswith("hf-dcp bench")
    assert expected in output.err


def test_sdpa_is_for_one_process() -> None:
    check_names(NAMES, 1)
    with pytest.raises(ValueError, match="sdpa"):
        check_names(["dcp", "sdpa"], 2)


def test_a_plan_without_exchange_or_compute() -> None:
    for name in ("dcp", "loongtrain-dense"):
        plans = make_rank_plans(name, BatchSpec([512], causal()), Topology.grid(2, 2), SHAPE, DcpConfig())
        for plan in plans:
            for which in PASSES:
                whole, compute, exchange = (
                    getattr(p.windows[0], which) for p in (plan, compute_only(plan), exchange_only(plan))
                )
                assert set(compute.program[:, 0].tolist()) == {Op.ATTEND, Op.FINISH} and not len(compute.messages)
                assert set(exchange.program[:, 0].tolist()) <= {Op.START, Op.WAIT, Op.FINISH}
                assert np.array_equal(exchange.messages, whole.messages)
            assert len({plan.digest, compute_only(plan).digest, exchange_only(plan).digest}) == 3
