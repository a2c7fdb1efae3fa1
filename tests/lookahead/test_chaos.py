"""The plan store fails in every way we know of; training ends with the parameters of an undisturbed run, to the bit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lookahead.chaos import STEPS, total
from tests.lookahead.ranks import run
from tests.lookahead.servers import RedisServer, binary, free_port

ROOT = Path(__file__).parents[2]
WORLD = 4
DEFAULT = ["calm", "killed", "flushed", "corrupted", "planner_fails", "resumed", "away_at_start"]
LONG = ["frozen", "full", "slow", "two_runs"]
Answers = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return run(DEFAULT, tmp_path_factory.mktemp("chaos"), binary("7"))


@pytest.fixture(scope="module")
def long_answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return run(LONG, tmp_path_factory.mktemp("chaos"), binary("7"))


def undisturbed(answers: Answers, name: str) -> None:
    """The scenario ended where the undisturbed run did, and left nothing in the store."""
    for answer, reference in zip(answers[name], answers["reference"]):
        assert answer["batches"] == reference["batches"] and len(answer["batches"]) == STEPS
        assert answer["parameters"] == reference["parameters"]
        assert answer["keys"] == []
    assert len({answer["parameters"] for answer in answers["reference"]}) == 1


def came_back(answers: Answers, name: str) -> None:
    """Plans were made anew while the store failed, and came from it again at the end."""
    assert total(answers[name])["replanned"] > 0
    assert all(answer["origins"][-1] in ("planned", "fetched") for answer in answers[name])
    assert all(answer["origins"][-2] in ("planned", "fetched") for answer in answers[name])


def test_without_disturbance_each_plan_is_made_once(answers: Answers) -> None:
    undisturbed(answers, "calm")
    assert total(answers["calm"]) == {"planned": STEPS, "fetched": (WORLD - 1) * STEPS}
    assert not any(answer["failing"] for answer in answers["calm"])


def test_the_comparison_sees_another_batch(answers: Answers) -> None:
    """Negative control: the parameters of the resumed run half way are others."""
    assert answers["resumed"][0]["half_way"] != answers["reference"][0]["parameters"]


def test_killed_and_restarted_empty(answers: Answers) -> None:
    undisturbed(answers, "killed")
    came_back(answers, "killed")


def test_flushed(answers: Answers) -> None:
    undisturbed(answers, "flushed")


def test_corrupted_payloads(answers: Answers) -> None:
    undisturbed(answers, "corrupted")
    for answer in answers["corrupted"]:
        assert set(answer["origins"][:11]) <= {"planned", "replanned"}
    assert total(answers["corrupted"])["replanned"] >= 11 * (WORLD - 1)
    came_back(answers, "corrupted")


def test_a_planner_that_fails_stops_every_rank(answers: Answers) -> None:
    for answer in answers["planner_fails"]:
        assert answer["steps"] == 6
        assert "RuntimeError: this batch is too odd to be planned" in answer["error"]
        rows = ", ".join(map(str, answer["rows"]))
        assert f"the batch of rows {rows} of the data set (lengths " in answer["error"]
        assert answer["seconds"] < 30


def test_resumed_in_the_middle_of_the_look_ahead(answers: Answers) -> None:
    undisturbed(answers, "resumed")
    assert all(answer["state"] == {"epoch": 0, "batches": 5} for answer in answers["resumed"])


def test_away_at_the_start_is_an_error_on_every_rank(answers: Answers) -> None:
    for answer in answers["away_at_start"]:
        nowhere, one_rank = answer["said"]
        assert nowhere.startswith("rank 0 can't use the plan store redis://127.0.0.1:")
        assert nowhere.endswith("nothing answers there: see that the server runs, and that host and port are right")
        assert one_rank.startswith("rank 2 can't use the plan store") and "has no database 77" in one_rank


@pytest.mark.slow
def test_frozen(long_answers: Answers) -> None:
    undisturbed(long_answers, "frozen")
    came_back(long_answers, "frozen")


@pytest.mark.slow
def test_full(long_answers: Answers) -> None:
    undisturbed(long_answers, "full")
    came_back(long_answers, "full")


@pytest.mark.slow
def test_slow(long_answers: Answers) -> None:
    undisturbed(long_answers, "slow")
    assert total(long_answers["slow"]) == {"planned": STEPS, "fetched": (WORLD - 1) * STEPS}


@pytest.mark.slow
def test_two_runs_on_one_server(long_answers: Answers) -> None:
    undisturbed(long_answers, "two_runs")
    for answer in long_answers["two_runs"]:
        assert answer["other"]["parameters"] == answer["other_alone"]["parameters"] != answer["parameters"]
        assert len(answer["prefixes"]) == 2
    assert total(long_answers["two_runs"]) == {"planned": STEPS, "fetched": (WORLD - 1) * STEPS}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["calm", "killed", "flushed", "full"])
def test_with_the_older_server(name: str, tmp_path: Path) -> None:
    undisturbed(run([name], tmp_path, binary("6.2")), name)


@pytest.mark.parametrize(
    "world, victim", [(2, 1), pytest.param(4, 1, marks=pytest.mark.slow), pytest.param(4, 0, marks=pytest.mark.slow)]
)
def test_a_killed_worker_ends_every_rank_within_seconds(world: int, victim: int, tmp_path: Path) -> None:
    with RedisServer(binary("6.2"), tmp_path) as server:
        words = [server.url, str(world), str(victim), str(free_port())]
        command = [sys.executable, "-m", "tests.lookahead.worker_killed", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=200)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        left = server.held()
    said = [line.split(maxsplit=3) for line in out.splitlines()]
    (killed,) = [float(words[0]) for words in said if words[1] == "killed"]
    errors = {int(words[2]): words[3] for words in said if words[1] == "ended"}
    exits = {int(words[2]): words[3] for words in said if words[1] == "exit"}
    assert exits == dict.fromkeys(range(world), "1"), (out, err[-3000:])
    times = [float(words[0]) - killed for words in said if words[1] == "ended"]
    assert len(times) == world and max(times) < 20, out
    # The signal of its end may come first, or that it is missed.
    assert re.search(r"DataLoader worker .*(is killed by signal|exited unexpectedly)", errors[victim]), out
    lost = f"rank {victim} of the group"
    assert all(lost in text or "closed by peer" in text for i, text in errors.items() if i != victim), out
    assert left == []  # taken out by the other processes as they ended
