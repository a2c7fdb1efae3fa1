"""Accelerate without Trainer, started by `accelerate launch` with a YAML file of the recipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import hf_dcp
from tests.integrations.launched import ACCUMULATION, RATE, batches_of
from tests.integrations.small import reference_loss, small_llama

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    target = tmp_path_factory.mktemp("launched") / "answer.json"
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    options = ["--config_file", "recipes/cpu_4.yaml", "--num_processes", "2"]
    done = subprocess.run(
        [*launch, *options, "tests/integrations/launched.py", str(target)], cwd=ROOT, capture_output=True, text=True,
        timeout=200, check=False, env=os.environ | {"HF_DCP_SIZE": "2", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(target.read_text())


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """One process, stock attention, row by row."""
    batches, model = batches_of(hf_dcp.DcpParallelismConfig(dcp_size=1)), small_llama("sdpa")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    everything, losses = [batches[i] for i in range(len(batches))], []
    for start in range(0, len(everything), ACCUMULATION):
        parts = [reference_loss(model, batch) for batch in everything[start : start + ACCUMULATION]]
        loss = sum(total for total, _ in parts) / sum(count for _, count in parts)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "parameters": torch.cat([p.detach().flatten() for p in model.parameters()])}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["loop", "FSDP2"])
def test_loops_equal_one_process(name: str, launched: dict[str, Any], reference: dict[str, Any]) -> None:
    assert launched[name]["losses"] == pytest.approx(reference["losses"], abs=1e-5)
    assert float((torch.tensor(launched[name]["parameters"]) - reference["parameters"]).abs().max()) <= 1e-6


@pytest.mark.timeout(300)
def test_the_size_comes_from_the_environment_and_must_come_from_somewhere(launched: dict[str, Any]) -> None:
    assert (launched["world"], launched["dcp_size"]) == (2, 2)
    assert launched["no size"].startswith("dcp_size is not given and there are 2 processes")
