"""`hf-dcp plan`: the keys of its JSON, and that its numbers are those of the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_dcp.cli.main import run
from hf_dcp.cli.report import imbalances, plan_bytes
from hf_dcp.config import DcpConfig
from hf_dcp.masks import causal, parse_mask
from hf_dcp.planning import BatchSpec, ModelShape, RankPlan, Topology, plan_batch
from hf_dcp.planning.batch import RowBytes

SMALL = ["--lengths", "700,300,24", "--nodes", "2", "--devices-per-node", "2", "--block-size", "64"]
BYTES = {"inter_node_bytes", "intra_node_bytes", "max_device_bytes"}
KEYS = {
    "tokens", "devices", "block_size", "head_groups", "tiles", "digest", "status", "cold_s", "planning_cpu_s",
    "placement", "forward", "backward", "backward_keep", "compute_imbalance", "token_imbalance", "limits", "divisions",
    "plan_bytes_per_rank", "baselines", "predicted", "bound",
}  # fmt: skip


def report(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run(["plan", *arguments, "--json"]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return json.loads(output.out)


def small_plan() -> Any:
    shape = ModelShape(heads=8, kv_heads=2, head_dim=128)
    return plan_batch(BatchSpec([700, 300, 24], causal()), Topology.grid(2, 2), shape, DcpConfig(block_size=64))


def test_keys(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(SMALL, capsys)
    assert found.keys() >= KEYS
    assert (found["tokens"], found["devices"], found["block_size"]) == (1024, 4, 64)
    assert found["planning_cpu_s"].keys() == {"tiles", "placement", "schedule", "serialise", "total"}
    for which in ("forward", "backward", "backward_keep"):
        assert found[which].keys() == BYTES
    assert found["divisions"].keys() == {"forward", "backward"}
    for part in found["divisions"].values():
        assert part.keys() == {"compute_share", "bytes", "exposed_s"}
        assert sum(part["compute_share"]) == pytest.approx(1)
    assert found["plan_bytes_per_rank"].keys() == {"max", "total"}
    assert found["predicted"].keys() == {"forward_s", "backward_s", "exposed_s"}
    assert found["baselines"].keys() == {"ring", "zigzag", "head-ring", "loongtrain"}
    for scheme in found["baselines"].values():
        assert scheme["dense"].keys() >= {"forward", "backward"}
    assert found["baselines"]["zigzag"]["row_exact"].keys() >= {"forward", "backward", "compute_imbalance"}


def test_numbers_are_those_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    found, plan = report(SMALL, capsys), small_plan()
    assert found["digest"] == f"{plan.digest:016x}"
    for which in ("forward", "backward", "backward_keep"):
        scored = plan.score.passes[which]
        assert found[which] == {
            "inter_node_bytes": scored.inter_node,
            "intra_node_bytes": scored.intra_node,
            "max_device_bytes": scored.max_device,
        }
    assert found["compute_imbalance"] == pytest.approx(plan.score.compute_imbalance)
    assert found["token_imbalance"] == pytest.approx(plan.score.token_imbalance)
    sizes = [len(rank_plan.to_bytes()) for rank_plan in plan.rank_plans]
    assert found["plan_bytes_per_rank"] == {"max": max(sizes), "total": sum(sizes)}


def test_bytes_of_one_remote_row_by_hand() -> None:
    """Two tokens that both attend to both, on two nodes: one KV row goes over, or a Q row goes over and comes back."""
    shape = ModelShape(heads=4, kv_heads=2, head_dim=8, dtype="fp32")
    config = DcpConfig(block_size=1, head_groups=1)
    plan = plan_batch(BatchSpec([2], parse_mask("full")), Topology((0, 1)), shape, config)
    row = RowBytes.of(shape, 1)
    moved = plan_bytes(plan, "forward")
    assert moved["intra_node_bytes"] == 0
    assert moved["inter_node_bytes"] in {2 * row.kv, row.q + row.partial_q + row.stat + row.kv}
    assert (row.kv, row.q, row.stat) == (2 * 2 * 8 * 4, 4 * 8 * 4, 16)
    assert imbalances(plan)[1] == 1.0


def test_layers_multiply_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    one, three = small_plan(), ModelShape(heads=8, kv_heads=2, head_dim=128, windows=((None, 3),))
    same = plan_batch(one.batch, one.topology, three, one.config, solver=lambda problem, config: one.placement)
    for which in ("forward", "backward"):
        assert plan_bytes(same, which) == {key: 3 * value for key, value in plan_bytes(one, which).items()}
    dense = [report([*SMALL, "--windows", f"none:{n}"], capsys)["baselines"]["ring"]["dense"] for n in (1, 3)]
    assert dense[1]["forward"] == {key: 3 * value for key, value in dense[0]["forward"].items()}


def test_windows_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    found = report([*SMALL, "--windows", "none:2,128:4"], capsys)
    assert found["forward"]["intra_node_bytes"] > 0
    assert sum(found["divisions"]["forward"]["compute_share"]) == pytest.approx(1)


def test_batch_file_with_masks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "batch.json"
    sequences = [{"length": 700}, {"length": 300, "mask": "window:32"}, {"length": 24, "mask": "full"}]
    file.write_text(json.dumps({"sequences": sequences}))
    rest = [*SMALL[2:], "--mask", "shared:0.2x4"]
    found = report(["--batch", str(file), *rest], capsys)
    masks = [parse_mask(text) for text in ("shared:0.2x4", "window:32", "full")]
    plan = plan_batch(
        BatchSpec([700, 300, 24], masks), Topology.grid(2, 2), ModelShape(8, 2, 128), DcpConfig(block_size=64)
    )
    assert found["digest"] == f"{plan.digest:016x}"


def test_saved_rank_plans_are_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report([*SMALL, "--save", str(tmp_path / "plan")], capsys)
    files = sorted((tmp_path / "plan").iterdir())
    plans = [RankPlan.from_bytes(file.read_bytes()) for file in files]
    assert [plan.rank for plan in plans] == [0, 1, 2, 3]
    assert {f"{plan.digest:016x}" for plan in plans} == {found["digest"]}
    owned = np.concatenate([plan.local_tokens() for plan in plans])
    assert sorted(owned.tolist()) == list(range(1024))


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert run(["plan", *SMALL, "--save", str(tmp_path / "file" / "x")]) == 2
    assert "name another folder" in capsys.readouterr().err


def test_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    assert run(["plan", *SMALL]) == 0
    text = capsys.readouterr().out
    for expected in ("1,024 tokens on 4 devices", "DCP", "zigzag, row exact", "loongtrain, dense", "digest", "status"):
        assert expected in text
    assert "…" not in text


def test_equal_calls_give_equal_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(SMALL, capsys)["digest"] == report(SMALL, capsys)["digest"]
