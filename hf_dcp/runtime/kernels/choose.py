"""Which kernels an attention call runs on, checked before anything runs.

The rule: on a CPU, `aten`; on a CUDA GPU, `triton`. `flash` is taken only where it is asked for, since its partial outputs
are rounded to the model's type before they are merged; and then it computes the tile lists whose slices are large, and
Triton the others (see `hf_dcp.runtime.kernels.flash.worth`).
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from hf_dcp.config import KERNELS
from hf_dcp.runtime.kernels.interpreter import interpreted
from hf_dcp.runtime.kernels.tuning import HEAD_DIMS

if TYPE_CHECKING:
    from hf_dcp.runtime.executor import Executor

TRITON, FLASH = "3.4", "2.7"
"""The oldest versions that will do."""
CAPABILITY = (8, 0)
"""Of a GPU: Ampere or newer."""
FLASH_DTYPES = ("bf16", "fp16")
TRITON_DTYPES = (*FLASH_DTYPES, "fp32")


def choose_kernel(kernel: str, device: torch.device, dtype: str, head_dim: int) -> str:
    """The kernels to run on: "aten", "triton" or "flash".

    Args:
        kernel: what the settings say; "auto" chooses.
        dtype: of Q, K and V, such as "bf16".

    Raises:
        ValueError: if these kernels can't run there; the text says what to install, or what to write instead.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, not {kernel!r}")
    if kernel == "auto":
        kernel = "triton" if device.type == "cuda" else "aten"
    if kernel == "aten":
        if device.type != "cpu":
            raise ValueError(f'kernel "aten" runs on CPUs, not on {device.type}: write kernel="auto"')
        return kernel
    _check_gpu(kernel, device)
    _require("triton", TRITON, "pip install triton")
    dtypes = FLASH_DTYPES if kernel == "flash" else TRITON_DTYPES
    if dtype not in dtypes:
        raise ValueError(f'kernel "{kernel}" computes {", ".join(dtypes)}, not {dtype}: load the model as bf16')
    if head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        raise ValueError(f'kernel "{kernel}" has head dims {known}, not {head_dim}: use attn_implementation="sdpa"')
    if kernel == "flash" and (find_spec("flash_attn") or not find_spec("kernels")):
        _require("flash_attn", FLASH, 'pip install "hf-dcp[flash]"')
    return kernel


def executor_class(kernel: str, device: torch.device, dtype: str, head_dim: int) -> type[Executor]:
    """What executes plans on the kernels that `choose_kernel` names."""
    chosen = choose_kernel(kernel, device, dtype, head_dim)
    if chosen == "aten":
        from hf_dcp.runtime.executor import Executor

        return Executor
    if chosen == "flash":
        from hf_dcp.runtime.flash_executor import FlashExecutor

        return FlashExecutor
    from hf_dcp.runtime.device_executor import DeviceExecutor

    return DeviceExecutor


def _check_gpu(kernel: str, device: torch.device) -> None:
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < CAPABILITY:
            name = torch.cuda.get_device_name(device)
            raise ValueError(f'kernel "{kernel}" needs compute capability 8.0 or newer, not {name}: train on a CPU')
    elif kernel == "flash" or not interpreted():
        raise ValueError(f'kernel "{kernel}" runs on CUDA GPUs, not on {device.type}: write kernel="auto"')


def _require(package: str, least: str, install: str) -> None:
    """Raise ValueError unless a package is there, new enough."""
    try:
        found = version(package.replace("_", "-")) if find_spec(package) else None
    except PackageNotFoundError:
        found = None
    if found is None:
        raise ValueError(f"the kernel needs {package} {least} or newer, which is not installed: {install}")
    if _numbers(found) < _numbers(least):
        raise ValueError(f"the kernel needs {package} {least} or newer, not {found}: {install} --upgrade")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2] if part.isdecimal())
