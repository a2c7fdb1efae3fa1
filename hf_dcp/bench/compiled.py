"""Ahead-of-time compilation of every shipped kernel configuration, on machines without a GPU: registers, shared memory
and spills of its cubin."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_dcp.bench.cubin import Resources, resources_of
from hf_dcp.runtime.kernels import triton_common, tuning
from hf_dcp.runtime.kernels.triton import ROWS_PER_PROGRAM, power
from hf_dcp.runtime.kernels.triton_dkv import dkv
from hf_dcp.runtime.kernels.triton_dq import dq
from hf_dcp.runtime.kernels.triton_forward import forward
from hf_dcp.runtime.kernels.triton_merge import finish_rows, merge_rows

TILE_KERNELS = {"forward": forward, "dq": dq, "dkv": dkv}
ROW_KERNELS = {"merge": merge_rows, "finish": finish_rows}
KERNELS = TILE_KERNELS | ROW_KERNELS
CAPABILITIES = (80, 90, 100)
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that one block can have."""
INPUTS = ("q_", "g_", "k_", "v_")
"""Tensors of the model's type; the others that hold numbers are fp32."""


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
        packed = f", pack {self.pack}" * (self.kernel in TILE_KERNELS)
        extra = packed + (f", {self.dtype}" if self.dtype != "bf16" else "") + ", softcap" * self.capped
        return f"{self.kernel} D{self.head_dim} {self.shape}{extra}"

    @property
    def constants(self) -> dict[str, Any]:
        """What the kernel is compiled for, as `hf_dcp.runtime.kernels.triton.TritonKernel` passes it."""
        if self.kernel in ROW_KERNELS:
            rows = {"N": self.shape.rows, "D": self.head_dim, "DP": power(self.head_dim)}
            return {"SINKS": True, **rows} if self.kernel == "finish" else rows
        config = tuning.Config(self.shape, self.pack)
        first, second = tuning.head_parts(self.head_dim)
        return {
            "PACK": config.pack, "T": config.tokens, "BM": config.rows, "BN": config.columns, "D1": first, "D2": second,
            "UNIT": 8, "CAPPED": self.capped, "EXACT": False,
        }  # fmt: skip

    @property
    def source(self) -> ASTSource:
        constants, arguments = self.constants, KERNELS[self.kernel].arg_names
        signature = {n: "constexpr" if n in constants else _type(n, self.dtype) for n in arguments}
        aligned = {
            (i,): [["tt.divisibility", 16]] for i, n in enumerate(arguments) if n not in constants and _aligned(n)
        }
        return ASTSource(KERNELS[self.kernel], signature, constexprs=constants, attrs=aligned)

    @property
    def options(self) -> dict[str, Any]:
        return {"num_warps": self.shape.warps, "num_stages": self.shape.stages, "enable_fp_fusion": True}

    @property
    def digest(self) -> str:
        """Of all that decides what compilation gives, but for the versions of the compilers: 16 hexadecimal digits."""
        source = self.source
        said = json.dumps([source.signature, sorted(self.constants.items()), sorted(source.attrs), self.options])
        text = said.encode() + b"".join(path.read_bytes() for path in sources(self.kernel))
        return hashlib.sha256(text).hexdigest()[:16]


@dataclass(frozen=True)
class Compiled:
    """What a variant needs: see `hf_dcp.bench.cubin.Resources`; ``shared`` in bytes.

    ``variant`` is its name, ``digest`` what it was compiled from.
    """

    variant: str
    capability: int
    digest: str
    registers: int
    shared: int
    spilled: int
    spilled_in_loops: int

    @property
    def name(self) -> str:
        return f"{self.variant} on sm_{self.capability}"


def sources(kernel: str) -> list[Path]:
    """The files that a kernel is written in."""
    return [Path(inspect.getfile(code)) for code in (triton_common, KERNELS[kernel].fn)]


def variants(full: bool = True) -> Iterator[Variant]:
    """Every shape that is shipped, for every head dim; and what else models of head dims 128 and 256 need.

    Args:
        full: or else the default shapes for the head dims 64 and 128 alone.
    """
    for kernel in TILE_KERNELS:
        for head_dim in HEAD_DIMS if full else (64, 128):
            shapes = tuning.shapes(kernel, head_dim)
            yield from (Variant(kernel, head_dim, shape) for shape in (shapes if full else shapes[:1]))
        if full:
            default = tuning.shapes(kernel, 128)[0]
            yield from (Variant(kernel, 128, default, pack=pack) for pack in (1, 7))
            yield Variant(kernel, 128, default, dtype="fp16")
            yield from (Variant(kernel, dim, tuning.shapes(kernel, dim)[0], capped=True) for dim in (128, 256))
    for kernel in ROW_KERNELS:
        for head_dim in HEAD_DIMS if full else (64, 128):
            yield Variant(kernel, head_dim, tuning.Shape(ROWS_PER_PROGRAM, power(head_dim), 4, 3))


def compile_variant(variant: Variant, capability: int) -> Compiled:
    """Compile to a cubin, and see what it needs."""
    binary = triton.compile(variant.source, target=GPUTarget("cuda", capability, 32), options=variant.options)
    needs: Resources = resources_of(binary.asm["cubin"])
    return Compiled(variant.name, capability, variant.digest, shared=binary.metadata.shared, **asdict(needs))


def _type(name: str, dtype: str) -> str:
    if name.endswith("_table") or name in ("blocks", "entries", "ranges", "rows"):
        return "*i32"
    if name in ("part", "sinks", "result"):
        return f"*{dtype}"
    if name in ("out", "lse", "part_lse"):
        return "*fp32"
    if name.endswith(("_local", "_remote")) and name != "num_local":
        return f"*{dtype}" if name.startswith(INPUTS) else "*fp32"
    return "fp32" if name in ("scale", "softcap") else "i32"


def _aligned(name: str) -> bool:
    """Whether the launcher finds an argument to be a multiple of 16: pointers, and strides."""
    numbers = ("num_local", "kv_heads", "heads", "h", "count", "scale", "softcap")
    return name not in numbers and not name.startswith(("lse_", "delta_"))


ONCE = "stored before the loops and loaded after them, once for a program"
ALLOWED_SPILLS: dict[tuple[str, int], str] = {
    **{
        (
            f"forward D128 128x64, 8 warps, 2 stages, pack 4{feature}",
            80,
        ): f"{ONCE}; 128x32 would spill nothing, and take twice the steps"
        for feature in ("", ", fp16", ", softcap")
    },
    ("dq D256 32x32, 8 warps, 1 stages, pack 4, softcap", 80): f"{ONCE}; with the 128 registers that it keeps to, two "
    "programs fit on a multiprocessor",
}
"""Spills that are known, by (variant, capability), each with its reason. None of them may be in a loop."""


def compile_all(full: bool = True, capabilities: Sequence[int] = CAPABILITIES) -> dict[str, Any]:
    """Compile everything: {"compiled": [...], "problems": [...], "ok": bool}."""
    compiled = [compile_variant(v, capability) for v in variants(full) for capability in capabilities]
    problems = [text for one in compiled for text in problems_of(one)]
    return {"compiled": [asdict(one) for one in compiled], "problems": problems, "ok": not problems}


def problems_of(one: Compiled) -> list[str]:
    """What is wrong with a compiled variant: unlisted spills, spills in a loop, too much shared memory."""
    found = []
    if one.spilled and (one.variant, one.capability) not in ALLOWED_SPILLS:
        found.append(f"{one.name} spills {one.spilled} bytes, and ALLOWED_SPILLS gives no reason for it")
    if one.spilled_in_loops:
        found.append(f"{one.name} stores or loads spilled registers {one.spilled_in_loops} times in loops")
    if one.shared > SHARED[one.capability]:
        found.append(f"{one.name} wants {one.shared} bytes of shared memory, and has {SHARED[one.capability]}")
    return found
