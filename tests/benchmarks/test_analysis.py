"""The numbers and plots of docs/analysis.md, on small batches."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from benchmarks import analysis
from benchmarks.analysis import SHAPE, STUDIES, Scale
from hf_dcp.bench.batches import with_mask
from hf_dcp.config import DcpConfig
from hf_dcp.planning.planner import plan_batch

ROOT = Path(__file__).parents[2]
SMALL = Scale(tokens=1024, batches=2, nodes=2, devices=1)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analysis, "MASKS", ("causal", "lambda:8,64"))
    monkeypatch.setattr(analysis, "SPARSE", ("causal", "lambda:8,64", "shared:0.2x4"))
    monkeypatch.setattr(analysis, "BLOCK_SIZES", (128, 256))
    monkeypatch.setattr(analysis, "EPSILONS", (0.1, 0.4))
    monkeypatch.setattr(analysis, "LONGEST", (1, 4))


def test_bytes_are_those_of_plans() -> None:
    rows = list(STUDIES["block_size"](SMALL))
    assert [(row["mask"], row["block_size"]) for row in rows] == [
        (mask, size) for mask in analysis.MASKS for size in (128, 256, "auto")
    ]
    found = []
    for lengths in SMALL.lengths():
        plan = plan_batch(with_mask(lengths, "causal"), SMALL.topology, SHAPE, DcpConfig(block_size=256))
        found.append(sum(plan.score.passes[which].inter_node for which in ("forward", "backward")) / 1e6)
    assert rows[1]["inter"] == pytest.approx(sum(found) / 2)
    assert all(row[part] >= 0 for row in rows for part in ("tiles", "placement", "schedule", "serialise"))


def test_sparser_masks_are_further_left() -> None:
    rows = {row["mask"]: row for row in STUDIES["sparsity"](SMALL)}
    assert rows["causal"]["share"] == 1
    assert 0 < rows["lambda:8,64"]["share"] < rows["shared:0.2x4"]["share"] < 1
    assert all(0 <= row["inter"] <= row["zigzag_inter"] for row in rows.values())


def test_more_imbalance_is_only_used_where_it_is_allowed() -> None:
    tight, loose = list(STUDIES["epsilon"](SMALL))[:2]
    assert tight["imbalance"] <= 1.1 + 1e-9 < loose["imbalance"] <= 1.4 + 1e-9
    assert loose["total"] < tight["total"]


def test_rows_are_cut_and_batches_stay_full() -> None:
    packed = analysis._packed([900, 40, 30], 100, 1000)
    assert max(packed) == 100
    assert packed[:3] == [100, 40, 30]
    assert 1000 - 30 < sum(packed) <= 1000  # not even the shortest fits any more
    rows = list(STUDIES["training"](SMALL))
    assert {(row["dataset"], row["longest"]) for row in rows} == {
        (name, length) for name in analysis.TRAINING_SETS for length in (1024, 256)
    }
    assert all(row["dcp_s"] > 0 and row["static_s"] > 0 for row in rows)


def test_the_script_draws_everything(tmp_path: Path) -> None:
    """Numbers that are there are drawn, those asked for are measured anew; a new file has all plots."""
    sys.path.insert(0, str(ROOT / "recipes"))
    figures = importlib.import_module("figures")
    numbers = tmp_path / "numbers.json"
    small = ["--tokens", "1024", "--batches", "1", "--nodes", "2", "--devices-per-node", "1"]
    places = ["--numbers", str(numbers), "--images", str(tmp_path)]
    figures.main(["--measure", "epsilon", *small, *places])
    assert {path.stem for path in tmp_path.glob("*.png")} == {"epsilon", *figures.CELL_PLOTS}
    before = json.loads(numbers.read_text())["epsilon"]
    figures.main(["--measure", "sparsity", *small, *places])
    assert json.loads(numbers.read_text())["epsilon"] == before
    assert (tmp_path / "sparsity.png").stat().st_size > 5000
    kept = json.loads(figures.NUMBERS.read_text())
    assert set(kept) == set(STUDIES)
