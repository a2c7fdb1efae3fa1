"""Kernels compile for GPUs that are not here, and spill no registers but where the reason is written down."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from hf_dcp.bench import compiled
from hf_dcp.bench.compiled import CAPABILITIES, HEAD_DIMS, KERNELS, Variant, compile_variant, problems_of, variants
from hf_dcp.runtime.kernels import tuning

DOCS = Path(__file__).parents[2] / "docs" / "gpu.md"
COMMON = [(kernel, 90) for kernel in KERNELS] + [("dkv", 80)]


@pytest.mark.timeout(900)  # seconds on an idle machine
@pytest.mark.parametrize(("kernel", "capability"), COMMON)
def test_the_most_common_configurations_do_not_spill(kernel, capability):
    variant = Variant(kernel, 128, tuning.shapes(kernel, 128)[0])
    assert not problems_of(compile_variant(variant, capability))


@pytest.mark.slow
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_no_shipped_configuration_spills(capability):
    found = [compile_variant(variant, capability) for variant in variants()]
    assert not [problem for one in found for problem in problems_of(one)]


def test_an_unlisted_spill_is_a_problem(monkeypatch):
    variant = Variant("dkv", 128, tuning.Shape(128, 128, 4, 2))
    spilled = compiled.Compiled(variant, 90, 255, 1024, 16, 16)
    assert "spills 16 bytes" in problems_of(spilled)[0]
    assert not problems_of(replace(spilled, spill_stores=0, spill_loads=0))
    monkeypatch.setitem(compiled.ALLOWED_SPILLS, (variant.name, 90), "for a test")
    assert not problems_of(spilled)
    assert "shared memory" in problems_of(replace(spilled, shared=300_000))[0]


def test_every_kernel_and_head_dim_is_shipped():
    shipped = {(v.kernel, v.head_dim) for v in variants()}
    assert shipped == {(kernel, head_dim) for kernel in KERNELS for head_dim in HEAD_DIMS}
    assert all(dim in tuning.HEAD_DIMS and sum(tuning.head_parts(dim)) == dim for dim in HEAD_DIMS)
    for v in variants():
        assert v.shape in tuning.shapes(v.kernel, v.head_dim)
        tokens = tuning.Config(v.shape, v.pack).tokens
        assert tokens >= 1 and tokens * v.pack <= v.shape.rows


def test_packed_heads_divide_those_of_a_kv_head():
    assert [tuning.packed(n) for n in (1, 4, 7, 16, 32, 71)] == [1, 4, 7, 16, 16, 1]


def test_the_table_in_the_docs_is_of_shipped_configurations():
    rows = re.findall(
        r"^\| ((?:forward|dq|dkv) D.*?) \| sm_(\d+) \| (\d+) \| ([\d,]+) \| (\d+) \|$", DOCS.read_text(), re.M
    )
    shipped = {(v.name, capability) for v in variants() for capability in CAPABILITIES}
    assert rows and {(name, int(capability)) for name, capability, *_ in rows} <= shipped
    spilled = {(name, int(capability)) for name, capability, _, _, spill in rows if int(spill)}
    assert spilled <= set(compiled.ALLOWED_SPILLS) <= shipped
