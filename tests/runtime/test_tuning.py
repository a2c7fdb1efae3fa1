"""Tile shapes: the default, and those of a file."""

from __future__ import annotations

import json

import pytest

from hf_dcp.runtime.kernels import tuning


def test_a_file_changes_the_shape(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "_TUNED", {})
    default, other = tuning.shapes("forward", 128)[:2]
    assert tuning.config("forward", 128, 4).shape == default
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps([{"kernel": "forward", "head_dim": 128, "shape": str(other), "ms": {}}]))
    tuning.load(path)
    assert tuning.config("forward", 128, 4).shape == other
    assert tuning.config("forward", 64, 4).shape == tuning.shapes("forward", 64)[0], "of that head dim alone"


@pytest.mark.parametrize("entry", [("forward", "512x512, 8 warps, 1 stages"), ("sideways", "64x64, 4 warps, 2 stages")])
def test_unknown_shapes_are_refused(entry, tmp_path):
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps([{"kernel": entry[0], "head_dim": 128, "shape": entry[1]}]))
    with pytest.raises(ValueError, match="isn't shipped: run hf-dcp bench kernels --tune again"):
        tuning.load(path)
