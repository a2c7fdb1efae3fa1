"""What users of context parallelism run into, by number: each a test here, or in the file that has it anyway."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

import hf_dcp
from hf_dcp.planning import BatchSpec, ModelShape, Topology, plan_batch
from tests.integrations.names import exists
from tests.integrations.reports import reports_on_ranks
from tests.integrations.small import IGNORE, rows, small_llama
from tests.multiprocess import run_ranks

os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
HERE = "tests/integrations/test_user_reports.py::"
STEP, TRAINER = "tests/integrations/test_step.py::", "tests/integrations/test_trainer.py::"
REFUSALS, RUNTIME = "tests/integrations/test_refusals.py::", "tests/runtime/"
REPORTS: dict[int, tuple[str, list[str]]] = {
    1: (
        "evaluate() gives the same loss for 1, 2 and 4 ranks",
        [TRAINER + "test_training_equals_one_process", TRAINER + "test_two_groups_of_two_equal_one_process"],
    ),
    2: ("an evaluation set with only one label has a finite loss", [TRAINER + "test_training_equals_one_process"]),
    3: ("one step has the same norm and weights", [STEP + "test_steps_on_two_ranks_equal_one_process"]),
    4: (
        "data parallel x DCP with unequal labels; average_tokens_across_devices=False is refused",
        [STEP + "test_steps_equal_one_process", REFUSALS + "test_trainer_settings_are_refused_when_it_is_built"],
    ),
    5: ("micro-batches with 10, 1000, 3 and 250 labels", [HERE + "test_report_05_accumulation"]),
    6: ("every token is counted once", [TRAINER + "test_training_equals_one_process"]),
    7: ("an epoch has every row once", [HERE + "test_report_07_an_epoch"]),
    8: ("eight tokens cut in two have seven labels", [HERE + "test_report_08_and_09_labels_at_a_cut"]),
    9: ("masked labels stay masked at a cut", [HERE + "test_report_08_and_09_labels_at_a_cut"]),
    10: (
        "a token of one document changes nothing in another, to the bit",
        ["tests/integrations/test_attention.py::test_changing_one_document_leaves_the_other_to_the_bit"],
    ),
    11: ("seven tokens on two ranks", [HERE + "test_report_11_and_12_odd_lengths"]),
    12: ("documents of 3, 5, 7 and 11 tokens", [HERE + "test_report_11_and_12_odd_lengths"]),
    13: ("rows that attend to nothing", [HERE + "test_report_13_rows_that_attend_to_nothing"]),
    14: (
        "two models in a process; a rank without work",
        [HERE + "test_report_14_two_models", STEP + "test_steps_equal_one_process"],
    ),
    15: ("131,072 tokens for four ranks are planned", [HERE + "test_report_15_a_long_plan"]),
    16: (
        "groups of three and six",
        [STEP + "test_steps_equal_one_process", HERE + "test_report_16_a_group_of_six_is_planned"],
    ),
    17: (
        "sequences longer than a sliding window",
        ["tests/integrations/test_families.py::test_family_on_two_ranks_equals_one_process"],
    ),
    18: ("dq, dk and dv of every rank against fp64", [RUNTIME + "test_distributed.py::test_any_plan_is_exact"]),
    19: ("permuted q, k and v", [RUNTIME + "test_attention.py::test_any_strides"]),
    20: (
        "a size without what activates it is an error",
        [
            REFUSALS + "test_bad_input_is_an_error_on_every_rank",
            "tests/integrations/test_accelerate.py::test_several_processes_and_no_size_are_an_error",
        ],
    ),
    21: (
        "a second context parallelism is refused",
        ["tests/integrations/test_accelerate.py::test_bad_settings_are_refused"],
    ),
    22: ("LoRA with checkpointing", [HERE + "test_report_22_lora"]),
    23: (
        "resume with batches planned ahead",
        [
            "tests/integrations/test_callback.py::test_resume_with_prefetch_in_a_later_epoch",
            "tests/data/test_loader.py::test_resume_is_exact",
        ],
    ),
    24: (
        "what can't run is refused when it is built",
        [
            REFUSALS + "test_models_are_refused_when_the_trainer_is_built",
            "tests/integrations/test_families.py::test_family_is_refused",
        ],
    ),
    25: (
        "one line says what is on",
        ["tests/integrations/test_callback.py::test_statistics_reach_loggers_and_the_start_is_announced"],
    ),
}
"""Number -> what must be right, and the tests that show it."""


@pytest.mark.parametrize("number", range(1, 26))
def test_every_report_has_its_tests(number: int) -> None:
    title, tests = REPORTS[number]
    assert title and tests
    for name in tests:
        assert exists(name), name


@pytest.fixture(scope="module")
def folder() -> Any:
    with tempfile.TemporaryDirectory() as name:
        yield name


@pytest.fixture(scope="module")
def results(folder: str) -> list[dict[str, Any]]:
    return run_ranks(reports_on_ranks, 2, folder, timeout=200)


def test_report_05_accumulation(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["accumulated"]["batches"] == 4
        assert result["accumulated"]["gradients"] <= 1e-6


def test_report_07_an_epoch(results: list[dict[str, Any]]) -> None:
    for result in results:
        got = result["epoch"]
        assert (got["steps"], got["epoch"]) == (4, 1.0)  # ceil(13 rows / (2 rows, 2 batches))
        assert got["rows"] == list(range(4, 17))
        assert got["tokens"] == got["labels"] == sum(range(4, 17))


def test_report_08_and_09_labels_at_a_cut(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["cut"]["rows"] == 4  # on each rank
        assert result["cut"]["all"] == [12, 13, 14, 15, 16, 17, 18, IGNORE]
        assert result["cut"]["prompt"] == [IGNORE] * 3 + [15, 16, 17, 18, IGNORE]


def test_report_11_and_12_odd_lengths(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["seven tokens"] <= 1e-6
        assert result["documents"] <= 1e-6


def test_report_13_rows_that_attend_to_nothing(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["nothing"]["finite"] == 1
        assert result["nothing"]["first half"] <= 1e-5


def test_report_14_two_models(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert max(result["two models"]) <= 1e-6


SHAPE = ModelShape(8, 2, 64, "bf16")


def test_report_15_a_long_plan() -> None:
    plan = plan_batch(BatchSpec([131072], hf_dcp.causal()), Topology.grid(1, 4), SHAPE)
    plan.check()
    assert sum(part.num_local for part in plan.rank_plans) == 131072


@pytest.mark.parametrize("world", [3, 6])
def test_report_16_a_group_of_six_is_planned(world: int) -> None:
    """Training on three ranks is in the other test; six processes are too many for one small machine."""
    plan = plan_batch(BatchSpec([700, 41, 3], hf_dcp.causal()), Topology.grid(1, world), SHAPE)
    plan.check()
    assert sum(part.num_local for part in plan.rank_plans) == 744


def test_report_22_lora(results: list[dict[str, Any]], folder: str) -> None:
    for result in results:
        for kind, error in result["lora"].items():
            assert error <= 1e-6, kind
    adapter = load_file(f"{folder}/adapter_model.safetensors")
    assert adapter and all("lora" in name for name in adapter)
    # Loaded where there is no DCP at all, the adapter gives the same logits.
    model = PeftModel.from_pretrained(small_llama("sdpa"), folder).eval()
    with torch.no_grad():
        ids = [torch.tensor([row["input_ids"]]) for row in rows([37, 12, 50, 5])]
        logits = torch.cat([model(input_ids=part, use_cache=False).logits[0] for part in ids])
    want = torch.load(f"{folder}/logits.pt", weights_only=True)
    assert float((logits - want).abs().max() / want.abs().max()) <= 1e-6
