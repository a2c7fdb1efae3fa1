"""How fast devices and links are, and where these numbers are from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hf_dcp.planning.simulate import DEFAULT_HARDWARE, HARDWARE, Rates

SOURCES = {
    "a100-efa": "8 A100 SXM per node: attained forward FLOP/s of FlashAttention-2; 400 Gbit/s EFA for 8 devices (AWS "
    "p4d); NVSwitch at 80 % of its 300 GB/s",
    "h100-ib": "8 H100 SXM per node: attained forward FLOP/s of FlashAttention-3; one 400 Gbit/s InfiniBand port per "
    "device at 90 %; NVSwitch at 80 % of its 450 GB/s",
    "h200-ib": "as h100-ib: an H200 has the H100's compute and links, and more memory",
}


@dataclass(frozen=True)
class Hardware:
    """Rates with a name and a source, as reports show them."""

    name: str
    rates: Rates
    source: str

    @classmethod
    def named(cls, name: str) -> Hardware:
        """Raises ValueError for an unknown name."""
        if name not in HARDWARE:
            raise ValueError(f"--hardware must be one of {', '.join(HARDWARE)}, not {name!r}")
        return cls(name, HARDWARE[name], SOURCES.get(name, "rates of hf_dcp.planning.simulate"))

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
        options = {"inter_bytes": "--link-gbps", "intra_bytes": "--intra-gbps", "device_flops": "--device-tflops"}
        scale = {"inter_bytes": 1e9 / 8, "intra_bytes": 1e9 / 8, "device_flops": 1e12}
        changes = {}
        for field, value in given.items():
            if value is None:
                continue
            if not 0 < value < float("inf"):
                raise ValueError(f"{options[field]} must be a number above 0, such as 100, not {value}")
            changes[field] = value * scale[field]
        if not changes:
            return self
        names = " and ".join(options[field] for field in changes)
        if len(changes) == len(given):
            return Hardware("given", replace(self.rates, **changes), names)
        return Hardware(f"{self.name} with {names}", replace(self.rates, **changes), f"given; the rest: {self.source}")

    def describe(self) -> str:
        """One line."""
        rates = self.rates
        return (
            f"{rates.device_flops / 1e12:.4g} TFLOP/s of attention per device, {rates.inter_bytes * 8 / 1e9:.4g} Gbit/s "
            f"between nodes and {rates.intra_bytes * 8 / 1e9:.4g} inside, per device and each way"
        )


DEFAULT = DEFAULT_HARDWARE
