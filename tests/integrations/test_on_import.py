"""``import hf_dcp`` makes the attention known, in whatever order packages are imported, and costs no import of torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = """
import inspect, sys
from transformers import LlamaConfig, LlamaForCausalLM, modeling_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
assert "dcp" in ALL_MASK_ATTENTION_FUNCTIONS
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
LlamaForCausalLM._from_config(config, attn_implementation="dcp")
assert "class PreTrainedModel" in inspect.getsource(modeling_utils)
assert not any("hf_dcp" in type(finder).__module__ for finder in sys.meta_path)
"""
LIGHT = "import sys, hf_dcp.planning\nassert not {'torch', 'transformers', 'accelerate'} & sys.modules.keys()\n"


@pytest.mark.parametrize(
    "code",
    [
        LIGHT + BUILD,
        "import transformers.modeling_utils, hf_dcp\n" + BUILD,
        "import hf_dcp\nhf_dcp.DcpParallelismConfig\n" + BUILD,
        "import hf_dcp, hf_dcp.integrations.attention\n" + BUILD,
    ],
    ids=["ours first", "transformers first", "plugin first", "attention first"],
)
def test_registered_in_any_order(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
