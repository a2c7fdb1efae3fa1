"""Features of stock Trainer, on N ranks with DCP against one process with stock attention and padding."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np
import pytest

from tests.integrations.small import IGNORE
from tests.integrations.test_trainer import fresh
from tests.integrations.trainer_features import EVALUATION, features, on_ranks, trained, trainer_of
from tests.multiprocess import run_ranks


@pytest.fixture(scope="module")
def stock() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        answer = features(0, folder)
    # What bf16 costs a single process: DCP may cost as much, not more.
    answer["fp32"] = trained(trainer_of(0))
    fresh()
    return answer


def run(world: int, dp: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FEATURES_FOLDER"] = folder
        return run_ranks(on_ranks, world, dp, timeout=400)


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, Any]:
    first, second = run(2, 1)
    for name in ("predict", "preprocessed"):
        assert first[name] == second[name]
    return first


@pytest.fixture(scope="module")
def four_ranks() -> dict[str, Any]:
    return run(4, 1)[0]


@pytest.fixture(scope="module")
def two_groups() -> dict[str, Any]:
    return run(4, 2)[-1]


TRAINED = [
    "compiled",
    "label smoothing",
    "router loss",
    "longrope",
    "local layers",
    "reentrant",
    "not reentrant",
    "best model",
]
ALL_TRAINED = {"label smoothing", "router loss", "longrope", "local layers"}


def check_trained(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["steps"] == want["steps"]
    assert got["loss"] == pytest.approx(want["loss"], abs=1e-5)
    assert got["eval"] == pytest.approx(want["eval"], abs=1e-5)
    assert got["norm"] == pytest.approx(want["norm"], rel=1e-4)
    assert np.abs(np.array(got["parameters"]) - np.array(want["parameters"])).max() <= 1e-6


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", TRAINED)
def test_training_equals_stock(name: str, two_ranks: dict[str, Any], stock: dict[str, Any]) -> None:
    check_trained(two_ranks[name], stock[name])
    if name in ALL_TRAINED:
        assert len(stock[name]["eval"]) == 2


def test_one_graph_for_all_plans(two_ranks: dict[str, Any]) -> None:
    """Six batches with as many plans; a second graph may come when a size turns out to change."""
    assert two_ranks["compiled"]["steps"] == 3
    assert 1 <= two_ranks["compiled"]["graphs"] <= 2


def test_the_best_model_is_chosen_and_training_stops_early(two_ranks: dict[str, Any], stock: dict[str, Any]) -> None:
    got, want = two_ranks["best model"], stock["best model"]
    assert got["best"] == want["best"] != f"checkpoint-{want['steps']}"
    assert want["steps"] < 8


def test_bf16_costs_no_more_than_in_one_process(two_ranks: dict[str, Any], stock: dict[str, Any]) -> None:
    exact = np.array(stock["fp32"]["parameters"])
    got, want = (np.abs(np.array(run["bf16"]["parameters"]) - exact).max() for run in (two_ranks, stock))
    assert 0 < got <= 2 * want
    assert two_ranks["bf16"]["loss"] == pytest.approx(stock["bf16"]["loss"], rel=2e-2)


def check_predictions(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["shape"] == want["shape"] and len(got["logits"]) == len(EVALUATION)
    for ours, theirs in zip(got["logits"], want["logits"]):
        assert np.abs(np.array(ours) - np.array(theirs)).max() <= 1e-5
    # The first token of a row is nobody's label; DCP has none for it.
    ours, theirs = np.array(got["labels"]), np.array(want["labels"])
    assert (ours[:, 1:] == theirs[:, 1:]).all() and (ours[:, 0] == IGNORE).all()
    assert got["metrics"] == pytest.approx(want["metrics"], abs=1e-5)


@pytest.mark.parametrize("name", ["predict", "preprocessed"])
def test_predictions_are_those_of_stock_in_the_order_of_the_data(
    name: str, two_ranks: dict[str, Any], stock: dict[str, Any]
) -> None:
    check_predictions(two_ranks[name], stock[name])


def test_metrics_of_batches_equal_stock(two_ranks: dict[str, Any], stock: dict[str, Any]) -> None:
    for name in ("eval_loss", "eval_accuracy", "eval_labels"):
        assert two_ranks["in batches"][name] == pytest.approx(stock["in batches"][name], abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TRAINED)
def test_training_on_four_ranks_equals_stock(name: str, four_ranks: dict[str, Any], stock: dict[str, Any]) -> None:
    check_trained(four_ranks[name], stock[name])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_groups_equal_stock(two_groups: dict[str, Any], stock: dict[str, Any]) -> None:
    """Two groups, each with a batch, without accumulation, make the steps of one process with accumulation 2."""
    got, want = two_groups["label smoothing"], stock["label smoothing"]
    assert got["loss"] == pytest.approx(want["loss"], abs=1e-5)
    assert np.abs(np.array(got["parameters"]) - np.array(want["parameters"])).max() <= 1e-6
    ours, theirs = two_groups["predict"], stock["predict"]
    check_predictions(ours | {"metrics": {}}, theirs | {"metrics": {}})
    assert ours["metrics"]["test_accuracy"] == theirs["metrics"]["test_accuracy"]
