"""Ahead-of-time compilation of every shipped kernel configuration, on machines without a GPU: registers, shared memory
and spills as ptxas states them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from hf_dcp.runtime.kernels import tuning
from hf_dcp.runtime.kernels.triton_dkv import dkv
from hf_dcp.runtime.kernels.triton_dq import dq
from hf_dcp.runtime.kernels.triton_forward import forward

KERNELS = {"forward": forward, "dq": dq, "dkv": dkv}
CAPABILITIES = (80, 90, 100)
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that one block can have."""
INPUTS = ("q_", "g_", "k_", "v_")
"""Tensors of the model's type; the others that hold numbers are fp32."""
WHOLE = ("blocks", "entries", "ranges", "num_local", "kv_heads", "h")


@dataclass(frozen=True)
class Variant:
    """One kernel as it is compiled."""

    kernel: str
    head_dim: int
    shape: tuning.Shape
    pack: int = 4
    dtype: str = "bf16"
    capped: bool = False

    @property
    def name(self) -> str:
        extra = f", pack {self.pack}" + (f", {self.dtype}" if self.dtype != "bf16" else "") + ", softcap" * self.capped
        return f"{self.kernel} D{self.head_dim} {self.shape}{extra}"


@dataclass(frozen=True)
class Compiled:
    """What compilation says of a variant."""

    variant: Variant
    capability: int
    registers: int
    shared: int
    spill_stores: int
    spill_loads: int

    def row(self) -> dict[str, Any]:
        return {**asdict(self), "variant": self.variant.name}


def variants(full: bool = True) -> Iterator[Variant]:
    """Every shape that is shipped, for every head dim, and other packings, types and features of head dim 128.

    Args:
        full: or else the default shapes for the head dims 64 and 128 alone.
    """
    for kernel in KERNELS:
        for head_dim in HEAD_DIMS if full else (64, 128):
            shapes = tuning.shapes(kernel, head_dim)
            yield from (Variant(kernel, head_dim, shape) for shape in (shapes if full else shapes[:1]))
        if full:
            default = tuning.shapes(kernel, 128)[0]
            yield from (Variant(kernel, 128, default, pack=pack) for pack in (1, 7))
            yield Variant(kernel, 128, default, dtype="fp16")
            yield Variant(kernel, 128, default, capped=True)


def compile_variant(variant: Variant, capability: int) -> Compiled:
    """Compile to a cubin, and ask ptxas what it needed."""
    kernel = KERNELS[variant.kernel]
    config = tuning.Config(variant.shape, variant.pack)
    first, second = tuning.head_parts(variant.head_dim)
    constants = {
        "PACK": config.pack, "T": config.tokens, "BM": config.rows, "BN": config.columns, "D1": first, "D2": second,
        "UNIT": 8, "CAPPED": variant.capped, "EXACT": False,
    }  # fmt: skip
    signature = {name: _type(name, variant.dtype) for name in kernel.arg_names if name not in constants}
    signature |= dict.fromkeys(constants, "constexpr")
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name not in constants and _aligned(name)
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True}
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return Compiled(variant, capability, *_resources(binary.asm["ptx"], capability, binary.metadata.shared))


def _type(name: str, dtype: str) -> str:
    if name.endswith("_table") or name in WHOLE[:3]:
        return "*i32"
    if name.endswith(("_local", "_remote")) and name != "num_local":
        return f"*{dtype}" if name.startswith(INPUTS) else "*fp32"
    return "fp32" if name in ("scale", "softcap") else "i32"


def _aligned(name: str) -> bool:
    """Whether the launcher finds an argument to be a multiple of 16: pointers, and strides."""
    return name not in ("num_local", "kv_heads", "h", "scale", "softcap") and not name.startswith(("lse_", "delta_"))


def _resources(ptx: str, capability: int, shared: int) -> tuple[int, int, int, int]:
    """(registers, bytes of shared memory, bytes of spill stores, of spill loads)."""
    ptxas = get_ptxas(capability)
    architecture = f"sm_{capability}" + ("a" if capability >= 90 else "")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [ptxas.path, "-v", f"--gpu-name={architecture}", str(path), "-o", str(path.with_suffix(".cubin"))]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert registers and spills, said
    return int(registers[1]), shared, int(spills[1]), int(spills[2])


ALLOWED_SPILLS: dict[tuple[str, int], str] = {
    (
        "forward D128 128x64, 8 warps, 2 stages, pack 4",
        80,
    ): "12 bytes; tiles of half the size spill none, and load K and V twice",
}
"""Spills that are known, by (variant, capability), each with its reason."""


def compile_all(full: bool = True, capabilities: Sequence[int] = CAPABILITIES) -> dict[str, Any]:
    """Compile everything: {"compiled": [...], "problems": [...], "ok": bool}."""
    compiled = [compile_variant(v, capability) for v in variants(full) for capability in capabilities]
    problems = [text for one in compiled for text in problems_of(one)]
    return {"compiled": [one.row() for one in compiled], "problems": problems, "ok": not problems}


def problems_of(one: Compiled) -> list[str]:
    """What is wrong with a compiled variant: unlisted spills, too much shared memory."""
    found = []
    name = f"{one.variant.name} on sm_{one.capability}"
    if one.spill_stores and (one.variant.name, one.capability) not in ALLOWED_SPILLS:
        found.append(f"{name} spills {one.spill_stores} bytes, and ALLOWED_SPILLS gives no reason for it")
    if one.shared > SHARED[one.capability]:
        found.append(f"{name} wants {one.shared} bytes of shared memory, and has {SHARED[one.capability]}")
    return found
