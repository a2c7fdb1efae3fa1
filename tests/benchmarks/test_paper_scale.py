"""Predictions at the paper's scale: a row per data set and mask, and no speed-up of DCP below 1 on short batches."""

from __future__ import annotations

import importlib
import sys

import pytest

from tests.benchmarks.test_netcluster import ROOT


def test_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("paper_scale")
    monkeypatch.setattr(module, "TOKENS", 8192)
    monkeypatch.setattr(module, "DATASETS", ("longalign_10k",))
    monkeypatch.setattr(module, "MASKS", ("causal", "lambda:64,512"))
    monkeypatch.setattr(sys, "argv", ["paper_scale.py", "--batches", "1"])
    module.main()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows[2:]] == [["longalign_10k", "causal"], ["longalign_10k", "lambda:64,512"]]
    for row in rows[2:]:
        assert float(row[4].split()[0]) >= float(row[5].split()[0]) >= 1
