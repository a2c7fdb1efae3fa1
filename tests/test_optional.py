"""The package works where an optional part is absent, and planning works where torch is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXTRA_MODULES = {
    "redis": ["redis"],
    "kahypar": ["kahypar"],
    "gpu": ["triton"],
    "flash": ["flash_attn", "triton"],
    "trl": ["trl", "peft"],
    "view": ["matplotlib"],
}

PLAN_AND_EXECUTE = """
import numpy as np
from hf_dcp.masks import causal
from hf_dcp.planning import BatchSpec, ModelShape, Topology, plan_batch
from hf_dcp.planning.plan import RankPlan
plan = plan_batch(BatchSpec([40, 7], causal()), Topology.grid(2, 2), ModelShape(4, 2, 8, "fp32"))
plan.check()
assert RankPlan.from_bytes(plan.rank(1).to_bytes()).to_bytes() == plan.rank(1).to_bytes()
"""


def run_without(modules: list[str], code: str) -> None:
    """Run code in a fresh process in which importing the modules fails."""
    blocked = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in modules)
    done = subprocess.run(
        [sys.executable, "-c", blocked + code], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_planning_works_without_torch_and_everything_above_it() -> None:
    run_without(["torch", "transformers", "accelerate", "datasets", "trl"], PLAN_AND_EXECUTE)


def test_the_plan_command_does_not_import_torch() -> None:
    code = "from hf_dcp.cli.main import run\nassert run(['plan', '--lengths', '40,7', '--json']) == 0\n"
    run_without(["torch", "transformers", "accelerate", "datasets", "trl"], code)


def test_every_extra_is_covered_here() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) - {"test", "docs", "all"} == set(EXTRA_MODULES)


USE = """
import hf_dcp
from transformers import LlamaConfig, LlamaForCausalLM
hf_dcp.DcpParallelismConfig, hf_dcp.DcpStatsCallback, hf_dcp.DcpDataLoader, hf_dcp.DcpConfig
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
LlamaForCausalLM._from_config(config, attn_implementation="dcp")
"""


def test_the_package_works_without_any_extra() -> None:
    run_without([module for modules in EXTRA_MODULES.values() for module in modules], USE + PLAN_AND_EXECUTE)


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRA_MODULES)
def test_the_package_works_without_one_extra(extra: str) -> None:
    run_without(EXTRA_MODULES[extra], USE + PLAN_AND_EXECUTE)


def test_choosing_an_absent_solver_says_what_to_install() -> None:
    code = (
        "from hf_dcp.config import DcpConfig\n"
        "from hf_dcp.masks import causal\n"
        "from hf_dcp.planning import BatchSpec, ModelShape, Topology, plan_batch\n"
        "try:\n"
        "    plan_batch(BatchSpec([400, 70], causal()), Topology.grid(2, 2), ModelShape(4, 2, 8),"
        " DcpConfig(placement='kahypar'))\n"
        "except (ValueError, ImportError) as error:\n"
        "    assert 'pip install' in str(error) and 'kahypar' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('planned without the solver')\n"
    )
    run_without(["kahypar"], code)
