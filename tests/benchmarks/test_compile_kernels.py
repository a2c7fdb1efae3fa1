"""The program that records what kernels need: it can be stopped, goes on, and forgets what isn't shipped any more."""

from __future__ import annotations

import sys

import pytest

triton = pytest.importorskip("triton")
pytest.importorskip("matplotlib")

from hf_dcp.bench.compiled import CAPABILITIES, Compiled, variants
from hf_dcp.bench.compiled_record import BEGIN, END, Record
from tests.benchmarks.test_cluster import load


@pytest.fixture
def program(monkeypatch, tmp_path):
    program = load("compile_kernels")
    monkeypatch.setattr(program, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(program, "PAGE", tmp_path / "page.md")
    program.PAGE.write_text(f"before\n{BEGIN}old\n{END}after\n")
    monkeypatch.setattr(
        program, "compile_variant", lambda v, capability: Compiled(v.name, capability, v.digest, 100, 1024, 0, 0)
    )
    return program


def run(program, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["compile_kernels.py", *arguments])
    return program.main()


def test_it_records_all_and_writes_the_table(program, monkeypatch, capsys):
    monkeypatch.setattr("hf_dcp.bench.compiled_record.ALLOWED_SPILLS", {})
    assert run(program, monkeypatch) == 0
    record, page = Record.load(program.RECORD), program.PAGE.read_text()
    assert len(record.compiled) == len(list(variants())) * len(CAPABILITIES)
    assert page.startswith("before\n") and page.endswith("after\n") and "old" not in page
    assert page.count("100 / 1,024 / 0") == len(record.compiled)
    capsys.readouterr()
    assert run(program, monkeypatch) == 0
    assert capsys.readouterr().out == "", "nothing is compiled a second time"


def test_it_goes_on_where_it_stopped(program, monkeypatch):
    assert run(program, monkeypatch, "--seconds", "-1") == 1
    assert "old" in program.PAGE.read_text(), "no table of a part"
    record = Record(triton.__version__, [Compiled("dq D1", 90, "0" * 16, 1, 1, 0, 0)])
    record.save(program.RECORD)
    monkeypatch.setattr("hf_dcp.bench.compiled_record.ALLOWED_SPILLS", {})
    assert run(program, monkeypatch) == 0
    assert all(one.variant != "dq D1" for one in Record.load(program.RECORD).compiled)


def test_a_kernel_that_spills_makes_it_fail(program, monkeypatch, capsys):
    monkeypatch.setattr(
        program, "compile_variant", lambda v, capability: Compiled(v.name, capability, v.digest, 255, 1024, 64, 2)
    )
    assert run(program, monkeypatch) == 1
    assert "spills 64 bytes" in capsys.readouterr().err
