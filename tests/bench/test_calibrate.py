"""Rates that are measured on ranks of this machine, and what takes them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from hf_dcp.bench.calibrate import CalibrationSettings, calibrate, link_pairs
from hf_dcp.bench.group import Group
from hf_dcp.cli.main import run
from hf_dcp.config import DcpConfig
from hf_dcp.planning.batch import ModelShape, Topology
from hf_dcp.rates import HARDWARE, Rates
from tests.multiprocess import run_ranks

SMALL = CalibrationSettings(ModelShape(4, 2, 16, "fp32"), tokens=512, message_bytes=1 << 20, repeats=2)
ASSUMED_ALONE = {"inter_bytes", "intra_bytes", "latency_s", "intra_latency_s"}


def measured(nodes: int) -> dict[str, Any]:
    group = Group.join(nodes=nodes)
    try:
        return calibrate(SMALL, group)
    finally:
        group.leave()


@pytest.mark.parametrize("nodes", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_two_ranks(nodes: int) -> None:
    reports = run_ranks(measured, 2, nodes)
    assert reports[0] == reports[1]
    rates = Rates(**reports[0]["rates"])
    absent = {"intra_bytes", "intra_latency_s"} if nodes == 2 else {"inter_bytes", "latency_s"}
    assert set(reports[0]["assumed"]) == absent
    assert all(getattr(rates, name) == getattr(HARDWARE["a100-efa"], name) for name in absent)
    rate, latency = (rates.inter_bytes, rates.latency_s) if nodes == 2 else (rates.intra_bytes, rates.intra_latency_s)
    assert 1e6 < rate < 1e12 and 1e-6 < latency < 1
    assert 1e7 < rates.device_flops < 1e14
    assert 0 <= rates.launch_s < 1 and 0 <= rates.call_s < 1 and 0 <= rates.row_s < 1e-2
    assert reports[0]["backward_over_forward"] > 0


def test_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the command writes is what other commands take."""
    file, report = tmp_path / "rates.json", tmp_path / "report.json"
    small = [
        "--heads",
        "4",
        "--kv-heads",
        "2",
        "--head-dim",
        "16",
        "--dtype",
        "fp32",
        "--tokens",
        "512",
        "--repeats",
        "1",
    ]
    assert run(["bench", "calibrate", *small, "--hardware", "h100-ib", "--save", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    report.write_text(json.dumps(found))
    assert set(found["assumed"]) == ASSUMED_ALONE
    assert found["rates"]["inter_bytes"] == HARDWARE["h100-ib"].inter_bytes
    assert Rates.read(file) == Rates.read(report) == Rates(**found["rates"])
    times = []
    for hardware in ([], ["--hardware", str(file)], ["--hardware", str(report)], ["--hardware", "h100-ib"]):
        assert run(["plan", "--lengths", "700,300", "--devices-per-node", "2", *hardware, "--json"]) == 0
        times.append(json.loads(capsys.readouterr().out)["predicted"])
    assert times[1] == times[2]
    assert len({json.dumps(t) for t in times}) == 3


def test_every_device_of_a_kind_sends_once() -> None:
    for node in ((0,), (0, 0), (0, 1), (0, 1, 0, 1), (0, 0, 0, 1, 2, 2), (1, 0, 1, 0, 1)):
        topology = Topology(node)
        for foreign in (False, True):
            pairs = link_pairs(topology, foreign)
            assert all((node[a] != node[b]) == foreign and a != b for a, b in pairs)
            able = [
                r for r in range(len(node)) if any((node[r] != n) == foreign and i != r for i, n in enumerate(node))
            ]
            assert sorted(a for a, _ in pairs) == able


def test_wrong_settings() -> None:
    for change in ({"tokens": 0}, {"message_bytes": 1}, {"repeats": 0}):
        with pytest.raises(ValueError, match=f"--{next(iter(change)).replace('_', '-')} must be an integer"):
            replace(SMALL, **change)


def test_settings_take_presets_and_rates() -> None:
    assert DcpConfig().rates == HARDWARE["a100-efa"]
    own = Rates(1e12, 1e9, 1e10)
    assert DcpConfig(hardware=own).rates == own
    assert json.loads(json.dumps(asdict(DcpConfig(hardware=own))))["hardware"]["inter_bytes"] == 1e9
    for wrong in ("b300", None, 3):
        with pytest.raises(ValueError, match="hardware must be one of a100-efa"):
            DcpConfig(hardware=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "field, value", [("device_flops", 0), ("inter_bytes", -1.0), ("latency_s", -1e-9), ("call_s", "1")]
)
def test_wrong_rates(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field} must be a number"):
        replace(HARDWARE["a100-efa"], **{field: value})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "is no JSON"),
        ("[]", "must hold an object"),
        ('{"device_flops": 1}', "must hold an object"),
        (None, "read"),
    ],
)
def test_wrong_files(tmp_path: Path, content: str | None, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rates.json"
    if content is not None:
        file.write_text(content)
    assert run(["plan", "--lengths", "8", "--hardware", str(file)]) == 2
    said = capsys.readouterr().err
    assert expected in said and said.count("\n") == 1
    assert run(["plan", "--lengths", "8", "--hardware", "b300"]) == 2
    assert "--hardware must be one of a100-efa" in capsys.readouterr().err
