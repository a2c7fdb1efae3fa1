"""`hf-dcp selftest`: what it prints, and how it refuses wrong arguments."""

from __future__ import annotations

import json

import pytest

from hf_dcp.cli.main import run


def test_selftest_prints_json(capsys):
    assert run(["selftest", "--world-size", "2", "--masks", "lambda:3,33", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] and len(result["cases"]) == 6 and len(result["steps"]) == 4
    wanted = {"name", "mask", "lengths", "heads", "block_size", "dtype", "out", "dq", "dk", "dv", "ok"}
    for case in result["cases"]:
        assert wanted | {"bytes_planned", "bytes_sent"} <= case.keys()
        assert case["bytes_sent"] == case["bytes_planned"]
        assert case["bytes_reference"] in (None, case["bytes_planned"])
    assert {"name", "loss", "grad", "ok"} == result["steps"][0].keys()
    assert {case["dtype"] for case in result["cases"]} == {"fp32"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("world_size", ["1", "2", "3", "4"])
def test_whole_selftest(world_size, dtype):
    assert run(["selftest", "--world-size", world_size, "--dtype", dtype]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world-size", "0"], "--world-size must be at least 1"),
        (["--device", "tpu"], "--device must be cpu"),
        (["--dtype", "fp8"], "--dtype must be one of fp32, bf16, fp16, fp64"),
        (["--masks", "causel"], "causel"),
        (["--masks", "shared:5,3,3"], "11"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    assert run(["selftest", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == "" and len(captured.err.splitlines()) == 1
