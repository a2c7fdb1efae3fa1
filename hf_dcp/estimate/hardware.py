"""How fast devices and links are, and where these numbers are from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hf_dcp.planning.simulate import DEFAULT_HARDWARE, HARDWARE, Rates

if TYPE_CHECKING:
    from hf_dcp.planning.batch import ModelShape

SOURCES = {
    "a100-efa": "8 A100 SXM a node: what FlashAttention-2 attains in forward; 400 Gbit/s EFA for 8 devices (AWS p4d); "
    "NVSwitch at 80 %",
    "h100-ib": "8 H100 SXM a node: what FlashAttention-3 attains in forward; one 400 Gbit/s InfiniBand port per device "
    "at 90 %; NVSwitch at 80 %",
    "h200-ib": "as h100-ib: an H200 computes as fast and has the same links",
}
OPTIONS = {"inter_bytes": "--link-gbps", "intra_bytes": "--intra-gbps", "device_flops": "--device-tflops"}
SCALE = {"inter_bytes": 1e9 / 8, "intra_bytes": 1e9 / 8, "device_flops": 1e12}


@dataclass(frozen=True)
class Hardware:
    """Rates with a name and a source, as reports show them."""

    name: str
    rates: Rates
    source: str

    @classmethod
    def named(cls, name: str = DEFAULT_HARDWARE) -> Hardware:
        """A preset, or a JSON file of `hf-dcp bench calibrate`. Raises ValueError for anything else."""
        if name.endswith(".json"):
            return cls(name, Rates.read(name), "measured by hf-dcp bench calibrate")
        if name not in HARDWARE:
            raise ValueError(
                f"--hardware must be one of {', '.join(HARDWARE)}, or a JSON file of hf-dcp bench calibrate, not {name!r}"
            )
        return cls(name, HARDWARE[name], SOURCES.get(name, "see hf_dcp.rates"))

    def with_given(
        self, link_gbps: float | None = None, intra_gbps: float | None = None, device_tflops: float | None = None
    ) -> Hardware:
        """With the rates that the user gave in their place.

        Args:
            link_gbps, intra_gbps: Gbit/s of a device's link between nodes and inside a node, each way.
            device_tflops: attained attention TFLOP/s of a device.

        Raises:
            ValueError: for a rate that is not above 0.
        """
        given = {"inter_bytes": link_gbps, "intra_bytes": intra_gbps, "device_flops": device_tflops}
        changes = {}
        for field, value in given.items():
            if value is None:
                continue
            if not 0 < value < float("inf"):
                raise ValueError(f"{OPTIONS[field]} must be a number above 0, such as 100, not {value}")
            changes[field] = value * SCALE[field]
        if not changes:
            return self
        names = ", ".join(OPTIONS[field] for field in changes)
        rest = "" if len(changes) == len(given) else f"; else {self.name}: {self.source}"
        return Hardware("as given", replace(self.rates, **changes), f"{names}{rest}")

    def calibrated(self, shape: ModelShape) -> Hardware:
        """With the attention of one layer of ``shape`` measured on this machine, and links too where a launcher has
        started several ranks."""
        import torch

        from hf_dcp.bench.calibrate import CalibrationSettings, calibrate
        from hf_dcp.bench.group import Group

        group = Group.join("cuda" if torch.cuda.is_available() else "cpu")
        try:
            report = calibrate(CalibrationSettings(replace(shape, windows=((None, 1),)), assumed=self.rates), group)
        finally:
            group.leave()
        kept = ", ".join(report["assumed"])
        source = f"attention measured on this machine's {report['device']}"
        return Hardware("calibrated", Rates(**report["rates"]), f"{source}; {kept} of {self.name}" if kept else source)

    def describe(self) -> str:
        """One line."""
        rates = self.rates
        return (
            f"{rates.device_flops / 1e12:.4g} TFLOP/s of attention per device, {rates.inter_bytes * 8 / 1e9:.4g} Gbit/s "
            f"between nodes and {rates.intra_bytes * 8 / 1e9:.4g} inside, per device and each way"
        )
