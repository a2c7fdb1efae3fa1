"""Ranks that are forked from one process which has imported everything and planned once: four ranks at the cost of one.

python -m tests.lookahead.ranks WORLD SECONDS FOLDER SCENARIO... runs `tests.lookahead.chaos.run_scenarios` on every rank,
and leaves what each has answered in FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(names: list[str], folder: Path, binary: str, world_size: int = 4, seconds: float = 280) -> dict[str, list[Any]]:
    """For each scenario, the answers of all ranks. When time is up, every process prints its stacks and is ended."""
    command = [
        sys.executable,
        "-m",
        "tests.lookahead.ranks",
        str(world_size),
        str(seconds),
        str(folder),
        binary,
        *names,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=seconds + 60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    files = [folder / f"{rank}.json" for rank in range(world_size)]
    answers = [json.loads(file.read_text()) if file.exists() else {"error": "no answer"} for file in files]
    errors = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
    if errors:
        pytest.fail("\n".join([*errors, said[-5000:]]))
    return {name: [answer["result"][name] for answer in answers] for name in answers[0]["result"]}


def main(world_size: int, seconds: float, folder: Path, binary: str, names: list[str]) -> None:
    import hf_dcp
    from hf_dcp.lookahead.planning import plan_batch
    from hf_dcp.planning import BatchSpec, ModelShape, Topology
    from hf_dcp.runtime.processes import _main
    from tests.lookahead.chaos import CONFIG, run_scenarios

    plan_batch(BatchSpec([40, 30], hf_dcp.causal()), Topology.grid(1, world_size), ModelShape(4, 2, 8, "fp32"), CONFIG)
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            arguments = (names, str(folder), binary)
            _main(rank, world_size, str(folder), "gloo", seconds, 60.0, run_scenarios, arguments)
        children.append(child)
    for _ in children:
        child, status = os.wait()
        if status:  # the others wait for it in vain
            for other in children:
                if other != child:
                    os.kill(other, signal.SIGALRM)
            break


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5:])
