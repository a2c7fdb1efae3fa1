"""Kernels compile for GPUs that are not here, and spill no registers but where the reason is written down."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from hf_dcp.bench import compiled
from hf_dcp.bench.compiled import (
    CAPABILITIES,
    HEAD_DIMS,
    KERNELS,
    TILE_KERNELS,
    Compiled,
    Variant,
    compile_variant,
    problems_of,
    variants,
)
from hf_dcp.bench.compiled_record import Record, with_table
from hf_dcp.bench.cubin import spills_in_loops
from hf_dcp.runtime.kernels import tuning

ROOT = Path(__file__).parents[2]
RECORD, PAGE = ROOT / "benchmarks" / "data" / "compiled_kernels.json", ROOT / "docs" / "gpu.md"
COMMON = [(kernel, 90) for kernel in TILE_KERNELS] + [("forward", 80), ("dkv", 100)]
GOOD = Compiled("forward D64 64x64, 4 warps, 1 stages, pack 4", 90, "0" * 16, 100, 1024, 0, 0)


@pytest.fixture
def record():
    return Record.load(RECORD)


def recorded(record, variant, capability):
    return next(one for one in record.compiled if (one.variant, one.capability) == (variant.name, capability))


def test_what_is_recorded_is_what_is_shipped_and_does_not_spill(record):
    assert not record.problems(triton.__version__)
    assert len(record.compiled) == len(list(variants())) * len(CAPABILITIES)


@pytest.mark.timeout(900)  # seconds on an idle machine
@pytest.mark.parametrize(("kernel", "capability"), COMMON)
def test_the_most_common_configurations_compile_to_what_is_recorded(kernel, capability, record):
    variant = Variant(kernel, 128, tuning.shapes(kernel, 128)[0])
    one = compile_variant(variant, capability)
    assert not problems_of(one)
    assert one == recorded(record, variant, capability)


@pytest.mark.slow
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_all_compile_to_what_is_recorded(kernel, capability, record):
    wanted = [variant for variant in variants() if variant.kernel == kernel]
    found = [compile_variant(variant, capability) for variant in wanted]
    assert found == [recorded(record, variant, capability) for variant in wanted]


def test_a_kernel_that_spills_is_found():
    spilling = compile_variant(Variant("dq", 256, tuning.Shape(64, 32, 8, 1)), 90)
    assert spilling.spilled > 50 and spilling.spilled_in_loops > 5
    problems = problems_of(spilling)
    assert "spills" in problems[0] and "in loops" in problems[1]


def test_spills_in_loops_are_told_from_those_outside():
    loop = "STL [R1], R2 ;\n.L_x_1:\n  LDL R2, [R1] ;\n  @!P1 BRA `(.L_x_0) ;\n  @P0 BRA `(.L_x_1) ;\n.L_x_0:\n LDL R2, [R1] ;"
    assert spills_in_loops(loop) == 1
    assert spills_in_loops(loop.replace("@P0 BRA `(.L_x_1)", "NOP")) == 0


def test_an_unlisted_spill_is_a_problem(monkeypatch):
    spilled = replace(GOOD, spilled=16)
    assert not problems_of(GOOD)
    assert "spills 16 bytes" in problems_of(spilled)[0]
    monkeypatch.setitem(compiled.ALLOWED_SPILLS, (GOOD.variant, 90), "for a test")
    assert not problems_of(spilled)
    assert "2 times in loops" in problems_of(replace(spilled, spilled_in_loops=2))[0], "no reason is good enough there"
    assert "shared memory" in problems_of(replace(GOOD, shared=200_000, capability=80))[0]
    assert not problems_of(replace(GOOD, shared=200_000)), "newer GPUs have more"


def test_a_changed_kernel_has_to_be_compiled_anew(record, monkeypatch, tmp_path):
    changed = tmp_path / "triton_dq.py"
    text = compiled.sources("dq")[1].read_text()
    changed.write_text(text.replace("dp - delta[:, None]", "dp"))
    assert changed.read_text() != text
    of = compiled.sources
    monkeypatch.setattr(
        compiled, "sources", lambda kernel: [*of(kernel)[:1], changed] if kernel == "dq" else of(kernel)
    )
    problems = record.problems(triton.__version__)
    assert problems and all(
        problem.startswith("dq ") and "not recorded as it is now" in problem for problem in problems
    )
    assert len(problems) == sum(v.kernel == "dq" for v in variants()) * len(CAPABILITIES)


def test_a_changed_tile_shape_has_to_be_compiled_anew(record, monkeypatch):
    monkeypatch.setitem(tuning.SHAPES["dkv"], 256, (tuning.Shape(16, 16, 4, 1),))
    problems = record.problems(triton.__version__)
    assert any("dkv D256 16x16, 4 warps, 1 stages, pack 4 on sm_80 is not recorded" in text for text in problems)
    assert any("dkv D256" in text and "not shipped" in text for text in problems)


def test_a_bad_record_is_found(record):
    here = record.triton
    first, *rest = record.compiled
    assert "is not recorded" in Record(here, rest).problems(here)[0]
    assert "recorded twice" in Record(here, [first, *record.compiled]).problems(here)[0]
    assert "spills 8 bytes" in Record(here, [replace(first, spilled=8), *rest]).problems(here)[0]
    assert "shared memory" in Record(here, [replace(first, shared=10**6), *rest]).problems(here)[0]
    assert "recorded with Triton 3.0.0" in Record("3.0.0", record.compiled).problems(here)[0]


def test_a_reason_without_a_spill_is_a_problem(record, monkeypatch):
    clean = next(one for one in record.compiled if not one.spilled)
    monkeypatch.setitem(compiled.ALLOWED_SPILLS, (clean.variant, clean.capability), "for a test")
    assert record.problems(record.triton) == [f"{clean.name} is in ALLOWED_SPILLS, and spills nothing"]


def test_the_table_in_the_docs_is_the_record(record):
    page = PAGE.read_text()
    assert with_table(page, record) == page
    assert with_table(page, replace(record, compiled=record.compiled[len(CAPABILITIES) :])) != page


def test_a_record_is_read_as_it_was_written(record, tmp_path):
    record.save(tmp_path / "record.json")
    assert Record.load(tmp_path / "record.json") == record
    assert json.loads(RECORD.read_text())["triton"] == record.triton


def test_every_kernel_and_head_dim_is_shipped():
    shipped = {(v.kernel, v.head_dim) for v in variants()}
    assert shipped == {(kernel, head_dim) for kernel in KERNELS for head_dim in HEAD_DIMS}
    assert all(dim in tuning.HEAD_DIMS and sum(tuning.head_parts(dim)) == dim for dim in HEAD_DIMS)
    for v in variants():
        if v.kernel in TILE_KERNELS:
            assert v.shape in tuning.shapes(v.kernel, v.head_dim)
            tokens = tuning.Config(v.shape, v.pack).tokens
            assert tokens >= 1 and tokens * v.pack <= v.shape.rows
    assert {(v.kernel, v.head_dim, v.shape) for v in variants() if v.kernel in TILE_KERNELS} == {
        (kernel, dim, shape) for kernel in TILE_KERNELS for dim in HEAD_DIMS for shape in tuning.shapes(kernel, dim)
    }


def test_packed_heads_divide_those_of_a_kv_head():
    assert [tuning.packed(n) for n in (1, 4, 7, 16, 32, 71)] == [1, 4, 7, 16, 16, 1]
