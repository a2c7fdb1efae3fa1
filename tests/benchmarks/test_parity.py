"""The parity study: what it launches, and what it says of results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import parity


def entry(mask: str, processes: int, losses: list[float]) -> dict:
    return {"run": {"mask": mask, "processes": processes}, "losses": losses}


RESULTS = [
    entry("causal", 4, [8.0, 7.5, 7.0]),
    entry("causal", 1, [8.0, 7.5 + 2e-6, 7.0 - 1e-6]),
    entry("full", 4, [8.0]),
]


def test_the_reference_has_no_dcp() -> None:
    one, four = parity.Run("causal", 1).command("out"), parity.Run("causal", 4).command("out")
    assert one[-2:] == ["--attention", "sdpa"]
    assert four[-2:] == ["--attention", "dcp"]
    same = [(a, b) for a, b in zip(one, four) if a != b]
    assert same == [("1", "4"), ("sdpa", "dcp")]


def test_differences_are_named_with_their_step() -> None:
    assert list(parity.pairs(RESULTS)) == ["causal"]
    assert "| `causal` | 8.0000 | 7.00000 | 7.00000 | 2.0e-06 | 2 |" in parity.table(RESULTS)
    with pytest.raises(ValueError, match="zip"):
        parity.differences([1.0], [1.0, 2.0])


def test_only_what_is_missing_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    monkeypatch.setattr(parity.Run, "losses", lambda self: trained.append(self) or [1.0])
    runs = [parity.Run("causal", n, 5) for n in (4, 1)]
    file = tmp_path / "data" / "parity.json"
    parity.run_missing(runs[:1], file)
    parity.run_missing(runs, file)
    assert trained == runs
    assert [one["run"]["processes"] for one in json.loads(file.read_text())] == [4, 1]


def test_curves_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    parity.draw(RESULTS, tmp_path / "parity.png")
    assert (tmp_path / "parity.png").stat().st_size > 10_000
