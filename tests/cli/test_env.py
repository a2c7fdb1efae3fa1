"""`hf-dcp env`: what is there is named, and nothing secret is."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import torch

from hf_dcp.cli.main import run


def test_versions_devices_solvers_and_stores(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DCP_REDIS_PASSWORD", "correct horse")
    monkeypatch.setenv("HF_DCP_PLAN_STORE", "redis://me:battery@staple:6379/0")
    assert run(["env", "--json"]) == 0
    text = capsys.readouterr().out
    facts = json.loads(text)
    assert facts["torch"] == torch.__version__
    assert facts["gpus"].startswith("none" if torch.cuda.device_count() == 0 else torch.cuda.get_device_name(0))
    assert ("kahypar" in facts["solvers"].split(", ")) == (find_spec("kahypar") is not None)
    assert facts["solvers"].startswith("own search, mtkahypar")
    assert ("Redis" in facts["plan stores"]) == (find_spec("redis") is not None)
    assert {"HF_DCP_PLAN_STORE", "HF_DCP_REDIS_PASSWORD"} <= set(facts["settings"].split(", "))
    assert not any(secret in text for secret in ("horse", "battery", "staple"))
    assert run(["env"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{name:<14} {value}" in shown for name, value in facts.items())
