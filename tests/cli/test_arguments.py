"""Wrong arguments of `hf-dcp`: exit status 2 and one line that says what is wrong and what to write instead."""

from __future__ import annotations

import pytest

from hf_dcp.cli.main import run

WRONG = {
    "no lengths": ([], "--lengths"),
    "both": (["--lengths", "8", "--batch", "x.json"], "either --lengths"),
    "lengths no numbers": (["--lengths", "8,x"], "integers with commas"),
    "lengths empty": (["--lengths", ""], "integers with commas"),
    "length 0": (["--lengths", "8,0"], "lengths[1] must be an integer of at least 1"),
    "length negative": (["--lengths=-8"], "lengths[0] must be an integer of at least 1"),
    "mask unknown": (["--lengths", "8", "--mask", "casual"], "unknown mask 'casual': write one of causal"),
    "window 0": (["--lengths", "8", "--mask", "window:0"], "window:"),
    "blockwise block 0": (["--lengths", "8", "--mask", "blockwise:0,2,1,1"], "blockwise:"),
    "lambda negative": (["--lengths", "8", "--mask", "lambda:-1,4"], "lambda:"),
    "documents sum": (["--lengths", "8", "--mask", "documents:4,5"], "9"),
    "shared sum": (["--lengths", "8", "--mask", "shared:4,5"], "9"),
    "block size 0": (["--lengths", "8", "--block-size", "0"], "--block-size must be an integer of at least 1"),
    "block size text": (["--lengths", "8", "--block-size", "big"], "\"auto\", not 'big'"),
    "head groups": (["--lengths", "8", "--head-groups", "3"], "kv_heads"),
    "kv heads": (["--lengths", "8", "--kv-heads", "3"], "kv_heads must divide heads"),
    "nodes 0": (["--lengths", "8", "--nodes", "0"], "nodes must be an integer of at least 1"),
    "nodes text": (["--lengths", "8", "--nodes", "many"], "write an integer, such as 4"),
    "epsilon text": (["--lengths", "8", "--epsilon", "wide"], "write a number, such as 0.1, or auto"),
    "epsilon negative": (["--lengths", "8", "--epsilon=-1"], "epsilon must be a number of at least 0"),
    "tolerance negative": (["--lengths", "8", "--token-tolerance=-1"], "token_tolerance must be"),
    "divisions 0": (["--lengths", "8", "--divisions", "0"], "divisions must be"),
    "dtype": (["--lengths", "8", "--dtype", "int8"], "--dtype must be one of"),
    "reduce dtype": (["--lengths", "8", "--reduce-dtype", "int8"], "reduce_dtype must be one of"),
    "placement": (["--lengths", "8", "--placement", "best"], "placement must be one of auto"),
    "windows": (["--lengths", "8", "--windows", "none,x"], "--windows must be like"),
    "window twice": (["--lengths", "8", "--windows", "none,none"], "windows must name each window once"),
    "unknown option": (["--lenghts", "8"], "use one of --lengths"),
    "missing value": (["--lengths"], "--lengths"),
    "extra argument": (["--lengths", "8", "9"], "9"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, expected = WRONG[name]
    assert run(["plan", *arguments, "--json"] if name != "missing value" else ["plan", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1, output.err
    assert output.err.startswith("hf-dcp plan: ")
    assert expected in output.err


FILES = {
    "no JSON": ("{", "is no JSON"),
    "a number": ("3", "must hold a list of lengths"),
    "empty": ("[]", "lengths is empty"),
    "text in list": ('["x"]', "lengths[0] must be an integer"),
    "no length": ('{"sequences": [{"mask": "causal"}]}', "sequence 0 must be like"),
    "unknown mask": ('{"sequences": [{"length": 8, "mask": "none"}]}', "unknown mask 'none'"),
    "mask does not fit": ('{"sequences": [{"length": 8}, {"length": 8, "mask": "documents:3,4"}]}', "sequence 1: "),
}


@pytest.mark.parametrize("name", FILES)
def test_wrong_batch_file(name: str, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    content, expected = FILES[name]
    file = tmp_path / "batch.json"
    file.write_text(content)
    assert run(["plan", "--batch", str(file)]) == 2
    output = capsys.readouterr()
    assert output.err.count("\n") == 1
    assert expected in output.err


def test_missing_batch_file(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--batch", str(tmp_path / "none.json")]) == 2
    assert "can't be read" in capsys.readouterr().err


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["paln"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("hf-dcp: there is no command 'paln': use one of plan, selftest, env")
    assert said.count("\n") == 1
