"""`hf-dcp view` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_dcp.cli.main import run

SMALL = ["--nodes", "2", "--devices-per-node", "2", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"]


def test_pictures_and_page_of_saved_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    plans, files = tmp_path / "plans", [tmp_path / name for name in ("a.html", "a.png", "a.svg")]
    assert run(["plan", "--lengths", "300,40", *SMALL, "--save", str(plans)]) == 0
    assert run(["view", str(plans), *(word for file in files for word in ("--out", str(file)))]) == 0
    assert capsys.readouterr().out.endswith("".join(f"wrote {file}\n" for file in files))
    assert files[0].read_text("utf-8").startswith("<!doctype html>")
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in files[2].read_text("utf-8")
    assert all(file.stat().st_size > 10_000 for file in files)


def test_one_of_several_windows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["view", "--lengths", "64", *SMALL, "--windows", "none:1,16:1", "--out", str(tmp_path / "a.html")]
    assert run([*arguments, "--window", "16"]) == 0
    narrow = (tmp_path / "a.html").read_text("utf-8")
    assert run(arguments) == 0
    assert (tmp_path / "a.html").read_text("utf-8") != narrow
    assert run([*arguments, "--window", "17"]) == 2
    assert "no part for sliding window 17" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a folder that hf-dcp plan --save has written, or --lengths"),
        (["nowhere"], "nowhere holds no rank plans"),
        (["nowhere", "--lengths", "8"], "give either a folder of rank plans, or --lengths, or --batch"),
        (["--lengths", "8", "--out", "plan.gif"], "must end in .html, .png, .svg or .pdf"),
        (["--lengths", "8", "--out", "no/where.html"], "in a folder that doesn't exist"),
        (["--lengths", "8", "--hardware", "abacus"], "hardware must be one of"),
    ],
)
def test_wrong_arguments(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["view", *words]) == 2
    assert message in capsys.readouterr().err
