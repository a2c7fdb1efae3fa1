"""The emulated cluster: namespaces, variables, exit status, clean-up, and the benchmark inside it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NETCLUSTER = ROOT / "benchmarks" / "netcluster"


def _namespaces_work() -> bool:
    """Root alone is not enough: containers may forbid network namespaces."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        return False
    name = f"probe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, timeout=20).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)
    return made


needs_namespaces = pytest.mark.skipif(not _namespaces_work(), reason="needs root, iproute2 and network namespaces")


def cluster(arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(NETCLUSTER), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **variables},
        cwd=ROOT,
    )


def own_namespaces() -> set[str]:
    return set(subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=20).stdout.splitlines())


def test_usage() -> None:
    done = cluster(["2"])
    assert done.returncode == 2
    assert "NODES RANKS_PER_NODE MBIT -- COMMAND" in done.stderr


@needs_namespaces
def test_every_rank_runs_in_its_node() -> None:
    before = own_namespaces()
    show = "echo $RANK $LOCAL_RANK $GROUP_RANK $WORLD_SIZE $HF_DCP_NODE $(ip -4 -o addr show eth0 | grep -o '10.77.0.[0-9]*/')"
    done = cluster(["2", "2", "100", "--", "sh", "-c", show])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")[:4]) == [
        "0 0 0 4 node0 10.77.0.1/",
        "1 1 0 4 node0 10.77.0.1/",
        "2 0 1 4 node1 10.77.0.2/",
        "3 1 1 4 node1 10.77.0.2/",
    ]
    assert own_namespaces() <= before


@needs_namespaces
def test_a_failing_rank_is_the_exit_status() -> None:
    assert cluster(["2", "1", "0", "--", "sh", "-c", "exit $((RANK * 7))"]).returncode == 7


@needs_namespaces
@pytest.mark.slow
def test_bytes_on_the_wire_are_those_that_were_planned(tmp_path: Path) -> None:
    """The interfaces count what the plan says, but for protocol headers and setting up."""
    main = "from hf_dcp.cli.main import main; main()"
    names = ["zigzag-dense", "dcp"]
    totals = {}
    for name in names:
        options = ["--lengths", "8192", "--placements", name, "--repeats", "2", "--no-alone", "--json"]
        command = [sys.executable, "-c", main, "bench", "attention", *options]
        done = cluster(["2", "1", "0", "--", *command], STATS_DIR=str(tmp_path), TIMEOUT_S="200")
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["node_of_rank"] == [0, 1]
        plan = report["results"][0]["plans"][name]
        planned = 3 * sum(plan[which]["bytes_planned"]["inter"] for which in ("forward", "backward"))
        assert plan["forward"]["bytes_sent"] == plan["forward"]["bytes_planned"]
        received, sent = map(int, (tmp_path / "node_0.txt").read_text().split())
        totals[name] = (planned, received + sent)
        assert planned <= received + sent <= 1.06 * planned + 2e6, totals
