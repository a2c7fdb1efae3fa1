"""How fast devices and links are: presets, and what `hf-dcp bench calibrate` has measured."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from math import isfinite
from pathlib import Path


@dataclass(frozen=True)
class Rates:
    """What a device and its links reach.

    Raises:
        ValueError: for a rate that is not above 0, or a time below 0.
    """

    device_flops: float
    """Attained attention FLOP/s of a device, forward."""
    inter_bytes: float
    """Bytes/s of a device's link between nodes, each way, all devices of a node at once."""
    intra_bytes: float
    """Bytes/s of a device's link inside its node, each way."""
    latency_s: float = 2e-5
    """Seconds from the start of a message between nodes to its first byte."""
    intra_latency_s: float = 2e-5
    """The same inside a node."""
    launch_s: float = 0.0
    """Seconds that a division takes beyond its arithmetic."""
    call_s: float = 0.0
    """Seconds that an attention call, forward or backward, takes beyond its divisions."""
    row_s: float = 0.0
    """Seconds that a division of forward takes for each of its query rows (all heads), whatever they attend to."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            number = not isinstance(value, bool) and isinstance(value, (int, float)) and isfinite(value)
            rate = not field.name.endswith("_s")
            if not number or value < 0 or (rate and value == 0):
                raise ValueError(f"{field.name} must be a number {'above' if rate else 'of at least'} 0, not {value!r}")

    @classmethod
    def read(cls, file: str | Path) -> Rates:
        """From a JSON file: an object of this class's fields, or a report of `hf-dcp bench calibrate --json`.

        Raises:
            ValueError: if the file can't be read, or holds something else.
        """
        try:
            content = json.loads(Path(file).read_text("utf-8"))
        except OSError as error:
            raise ValueError(f"rates can't be read from {file} ({error.strerror}): give a JSON file") from error
        except ValueError as error:
            raise ValueError(f"{file} is no JSON ({error}): write it with hf-dcp bench calibrate --save") from error
        if isinstance(content, dict) and isinstance(content.get("rates"), dict):
            content = content["rates"]
        names = [field.name for field in fields(cls)]
        if not isinstance(content, dict) or not {*names[:3]} <= set(content) <= {*names}:
            raise ValueError(f"{file} must hold an object with {', '.join(names[:3])} and maybe {', '.join(names[3:])}")
        return cls(**content)

    def write(self, file: str | Path) -> None:
        """Into a JSON file that `read` takes. Raises OSError if it can't be written."""
        Path(file).write_text(json.dumps(asdict(self), indent=1) + "\n", "utf-8")


HARDWARE = {
    "a100-efa": Rates(180e12, 400e9 / 8 / 8, 240e9),
    "h100-ib": Rates(500e12, 45e9, 360e9),
    "h200-ib": Rates(500e12, 45e9, 360e9),
}
"""Presets, 8 devices a node.

- `a100-efa`: A100 SXM, of whose 312 TFLOP/s of bf16 FlashAttention-2 attains somewhat more than half in a long causal forward
  with head dim 128 (Dao 2023, arXiv 2307.08691, the figures of forward speed); 400 Gbit/s of EFA a node (AWS,
  p4d.24xlarge), an eighth of it for each device; NVLink 3, 600 GB/s both ways (NVIDIA, A100), 80 % of 300 GB/s each way.
- `h100-ib`, `h200-ib`: H100 SXM, of whose 989 TFLOP/s of bf16 FlashAttention-3 attains half and more in a long causal forward
  with head dim 128 (Shah et al. 2024, arXiv 2407.08608, the figures of forward speed); the H200 computes as fast. One
  400 Gbit/s InfiniBand port for each device (NVIDIA, DGX H100), 90 % of 50 GB/s; NVLink 4, 900 GB/s both ways, 80 % of
  450 GB/s each way.

The shares of 80 and 90 % of what links reach, and 20 µs for the latency of a message, are our estimates; launch overheads
are left at 0. Measure your own with `hf-dcp bench calibrate`.
"""
DEFAULT_HARDWARE = "a100-efa"


def read_hardware(text: str | None) -> str | Rates | None:
    """What ``--hardware`` names: a preset, or the rates of a JSON file.

    Raises:
        ValueError: if it is neither.
    """
    if text is None or text in HARDWARE:
        return text
    if not text.endswith(".json") and not Path(text).is_file():
        raise ValueError(f"--hardware must be one of {', '.join(HARDWARE)}, or a JSON file, not {text!r}")
    return Rates.read(text)


def find_rates(hardware: str | Rates) -> Rates:
    """The rates of a preset, or those given. Raises ValueError for an unknown name."""
    if isinstance(hardware, Rates):
        return hardware
    if hardware not in HARDWARE:
        raise ValueError(
            f"hardware must be one of {', '.join(HARDWARE)}, or Rates (hf-dcp bench calibrate), not {hardware!r}"
        )
    return HARDWARE[hardware]
