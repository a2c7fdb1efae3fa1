"""Every parallel form beside DCP, on four gloo ranks, against one process."""

from __future__ import annotations

import os
import tempfile
import traceback
from typing import Any

import pytest
import torch.distributed as dist

from tests.integrations.parallel_forms import FORMS, LAYERS, labels_of, tensor_parallel
from tests.integrations.small import gradients, reference_loss, relative_error, small_llama
from tests.multiprocess import run_ranks

os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
TOLERANCE = 1e-6


def on_ranks(folder: str, names: list[str]) -> dict[str, Any]:
    """Errors of every form; rank 0 compares."""
    answers: dict[str, Any] = {}
    for name in names:
        step, batches = FORMS[name]
        try:
            got = step(folder) if step is tensor_parallel else step()
        except Exception as error:
            answers[name] = {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}
            continue
        if dist.get_rank() == 0:
            answers[name] = compare(got, batches)
    return answers


def compare(got: dict[str, Any], batches: list[list[dict[str, Any]]]) -> dict[str, float]:
    model = small_llama("sdpa", **LAYERS)
    loss = sum(reference_loss(model, batch)[0] for batch in batches) / sum(labels_of(batch) for batch in batches)
    loss.backward()
    want = gradients(model)
    assert want.keys() == got["gradients"].keys(), want.keys() ^ got["gradients"].keys()
    return {"loss": abs(got["loss"] - float(loss.detach())), "gradients": relative_error(got["gradients"], want)}


@pytest.fixture(scope="module")
def errors() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        small_llama("sdpa", **LAYERS).save_pretrained(folder)
        return run_ranks(on_ranks, 4, folder, list(FORMS), timeout=280)[0]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", FORMS)
def test_parallel_form_equals_one_process(name: str, errors: dict[str, Any]) -> None:
    assert "error" not in errors[name], errors[name]["error"]
    assert errors[name]["gradients"] <= TOLERANCE, errors[name]
    assert errors[name]["loss"] <= 1e-5, errors[name]
