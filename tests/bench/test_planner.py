"""The planner benchmark: its numbers are those of the plans and of the rivals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_dcp.bench.planner import PARTS
from hf_dcp.bench.planner_rivals import best_rivals, parse_rivals, ratio
from hf_dcp.cli.main import run
from hf_dcp.config import DcpConfig
from hf_dcp.masks import parse_mask
from hf_dcp.planning import BatchSpec, ModelShape, Topology, plan_batch
from hf_dcp.planning.objective import COSTED
from hf_dcp.planning.static import dense_bytes

LENGTHS = {"x": [700, 300, 24], "y": [512]}
GROUP = ["--nodes", "2", "--devices-per-node", "2", "--block-size", "64", "--repeats", "1", "--warmup", "0"]
MASKS = ("causal", "lambda:4,100")


def report(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run(["bench", "planner", *arguments, *GROUP, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "batches.json"
    found.write_text(json.dumps({"batches": LENGTHS}))
    return found


def test_one_entry_per_batch_and_mask(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    masks = [part for mask in MASKS for part in ("--mask", mask)]
    found = report(["--batches", str(file), *masks], capsys)
    assert [(r["mask"], r["batch"]) for r in found["results"]] == [(m, b) for m in MASKS for b in LENGTHS]
    topology, shape, config = Topology.grid(2, 2), ModelShape(8, 2, 128), DcpConfig(block_size=64)
    for result in found["results"]:
        batch = BatchSpec(LENGTHS[result["batch"]], parse_mask(result["mask"]))
        plan = plan_batch(batch, topology, shape, config)
        assert result["lengths"] == list(batch.lengths) and result["digest"] == f"{plan.digest:016x}"
        for which in COSTED:
            want = plan.score.passes[which]
            assert list(result[which].values()) == [want.inter_node, want.intra_node, want.max_device]
        assert set(result["planning_cpu_s"]) == {*PARTS, "total"}
        assert result["planning_cpu_s"]["total"] == pytest.approx(sum(result["planning_cpu_s"][part] for part in PARTS))
        assert set(result["against"]) == {"ring", "zigzag", "head-ring", "loongtrain"}
        for name, kinds in result["against"].items():
            dense = kinds["dense"]
            assert {which: dense[which] for which in COSTED} == dense_bytes(name, batch, topology, shape)
            assert dense["cost"] == sum(
                4 * dense[w]["inter_node_bytes"] + dense[w]["intra_node_bytes"] for w in ("forward", "backward")
            )
            assert dense["ratio"] == pytest.approx(result["cost"] / dense["cost"])
            if name != "loongtrain":
                same = plan_batch(batch, topology, shape, config.with_changes(placement=name)).score
                exact = kinds["row_exact"]
                assert (exact["cost"], exact["compute_imbalance"]) == (same.cost, same.compute_imbalance)
                assert exact["within_limits"] == (same.excess == 0)
        for kind, key in (("dense", "dense"), ("row_exact", "row_exact")):
            ratios = [kinds[key]["ratio"] for kinds in result["against"].values() if key in kinds]
            assert result["best"][kind]["ratio"] == max(ratios)


def test_layers_count(capsys: pytest.CaptureFixture[str]) -> None:
    one, three = (report(["--lengths", "512", "--windows", w], capsys)["results"][0] for w in ("none", "none:3"))
    assert three["cost"] == 3 * one["cost"]
    for name, kinds in three["against"].items():
        assert kinds["dense"]["cost"] == 3 * one["against"][name]["dense"]["cost"]


def test_solvers_and_inner_rings(capsys: pytest.CaptureFixture[str]) -> None:
    (result,) = report(["--lengths", "700,300", "--against", "mtkahypar,loongtrain:1,loongtrain:2"], capsys)["results"]
    assert set(result["against"]["mtkahypar"]) == {"row_exact"}
    assert result["against"]["mtkahypar"]["row_exact"]["placement_cpu_s"] > 0
    # a ring of two teams has inner rings of one or two; none of three
    assert set(result["against"]) == {"mtkahypar", "loongtrain:1", "loongtrain:2"}
    (absent,) = report(["--lengths", "700", "--against", "loongtrain:3"], capsys)["results"]
    assert absent["against"] == absent["best"] == {}


def test_the_best_rival_within_limits_is_told_apart() -> None:
    found = {
        "ring": {"row_exact": {"cost": 5, "ratio": 1.2, "within_limits": False}},
        "zigzag": {"row_exact": {"cost": 9, "ratio": 0.7, "within_limits": True}, "dense": {"cost": 20, "ratio": 0.3}},
    }
    assert best_rivals(found) == {
        "dense": {"name": "zigzag", "ratio": 0.3},
        "row_exact": {"name": "ring", "ratio": 1.2},
        "balanced": {"name": "zigzag", "ratio": 0.7},
    }
    assert (ratio(0, 0), ratio(3, 0), ratio(0, 3)) == (1.0, None, 0.0)


def test_table(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "planner", "--batches", str(file), *GROUP]) == 0
    text = capsys.readouterr().out
    for expected in ("4 devices on 2 nodes", "of bound", "zigzag, row exact", "loongtrain, dense", "serialise"):
        assert expected in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "give either --lengths"),
        (["--lengths", "8", "--against", "rings"], "--against must name some of ring"),
        (["--lengths", "8", "--against", "zigzag:4"], "loongtrain:4 for inner rings"),
        (["--lengths", "8", "--against", "ring,ring"], "--against must name each once"),
        (["--lengths", "8", "--repeats", "0"], "--repeats must be an integer of at least 1"),
        (["--lengths", "8", "--warmup=-1"], "--warmup must be an integer of at least 0"),
        (["--lengths", "7", "--mask", "documents:3,5"], "sequence 0: "),
        (["--batches", "none.json"], "--batches none.json can't be read"),
    ],
)
def test_wrong_arguments(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "planner", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1 and expected in output.err


def test_rivals_by_name() -> None:
    assert parse_rivals("") == ()
    assert parse_rivals("zigzag,loongtrain:8,kahypar") == ("zigzag", "loongtrain:8", "kahypar")


def test_the_study_samples_the_tables() -> None:
    from benchmarks.lengths import batches, read_distributions
    from benchmarks.planner_datasets import MASKS, SCALES, cases

    tables = read_distributions()
    for table in tables.values():
        assert table.percent[0] == 0 and table.percent[-1] == 100 and np.all(np.diff(table.percent) > 0)
        assert np.all(np.diff(table.length) >= 0)
    stream = batches(tables["wikipedia"], 1, 131072, seed=0)
    drawn = [next(stream) for _ in range(30)]
    assert all(0.75 * 131072 <= sum(batch) <= 131072 and min(batch) >= 1 for batch in drawn)
    lengths = np.concatenate(drawn)
    for percent, length in zip(tables["wikipedia"].percent, tables["wikipedia"].length):
        if 5 <= percent <= 95:
            share = 100 * (lengths <= length).mean()
            assert abs(share - percent) < 5 * np.sqrt(percent * (100 - percent) / len(lengths)) + 0.5
    found = list(cases(200))
    assert len(found) == len(set(found))
    for name in tables:
        assert 200 <= len({case[::2] for case in found if case[1] == name and case[3] == MASKS[0]}) <= 201
    assert {case[2] for case in found} == set(SCALES)
