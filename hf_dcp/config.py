"""User-facing settings of DCP: one validated, immutable dataclass."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from hf_dcp.rates import DEFAULT_HARDWARE, Rates, find_rates

PLACEMENTS = ("auto", "ring", "zigzag", "head-ring", "mtkahypar", "kahypar")
KERNELS = ("auto", "aten", "triton", "flash")
DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class DcpConfig:
    """How batches are planned and executed. Every field has a default that suits most runs.

    Raises:
        ValueError: if a field has a value it can't have; the text names the field and what to write instead.
    """

    block_size: int | Literal["auto"] = "auto"
    """Tokens per block, or ``"auto"`` to choose it for every sequence by estimated cost."""
    head_groups: int | Literal["auto"] = "auto"
    """Into how many groups the KV heads are cut (must divide them), or ``"auto"``: one per KV head, or joint."""
    epsilon: float | Literal["auto"] = 0.10
    """Allowed compute imbalance: max over devices / mean may be up to ``1 + epsilon``. ``"auto"``: plan with 0.10, for few
    bytes, and with 0.02, for even compute, and take what is predicted to be faster at the rates of ``hardware``, which
    should be measured ones. Planning takes twice as long."""
    epsilon_inter: float | None = None
    """Allowed compute imbalance between nodes; ``None`` means ``epsilon``. The paper uses 0.4."""
    epsilon_intra: float | None = None
    """Allowed compute imbalance between the devices of one node; ``None`` means ``epsilon``. The paper uses 0.1."""
    token_tolerance: float = 0.05
    """Allowed token imbalance: max over devices / mean may be up to ``1 + token_tolerance``."""
    divisions: int = 4
    """At most this many compute divisions per attention call; exchanges hide behind them."""
    seed: int = 0
    """Seed of every random choice of the planner. Equal inputs and seeds give equal plans, to the byte."""
    placement: str = "auto"
    """``"auto"`` searches; a static scheme or a single solver can be asked for by name (see ``PLACEMENTS``)."""
    reduce_dtype: str | None = None
    """Type in which partial results travel (``"fp32"``, ``"bf16"``, ``"fp16"``); ``None``: the type of the model."""
    backward_kv: Literal["refetch", "keep"] = "refetch"
    """Whether backward fetches remote Q and KV rows again or keeps those of forward (more memory, fewer bytes)."""
    kernel: Literal["auto", "aten", "triton", "flash"] = "auto"
    """Attention kernels: ``"aten"`` on CPUs, ``"triton"`` or ``"flash"`` on CUDA GPUs; ``"auto"``: aten or triton."""
    hardware: str | Rates = DEFAULT_HARDWARE
    """How fast devices and links are, for predicted times: a preset of `hf_dcp.rates.HARDWARE`, or
    ``hf_dcp.rates.Rates.read("rates.json")`` of a file that ``hf-dcp bench calibrate --save rates.json`` has written."""

    def __post_init__(self) -> None:
        _require_count("block_size", self.block_size, auto=True)
        _require_count("head_groups", self.head_groups, auto=True)
        _require_count("divisions", self.divisions)
        for name in ("epsilon", "token_tolerance", "epsilon_inter", "epsilon_intra"):
            value = getattr(self, name)
            if (value is None and name.startswith("epsilon_")) or (name == "epsilon" and value == "auto"):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                choice = ' or "auto",' if name == "epsilon" else ""
                raise ValueError(f"{name} must be a number of at least 0, such as 0.1,{choice} not {value!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be an integer from 0 to 2**63 - 1, not {self.seed!r}")
        _require_choice("placement", self.placement, PLACEMENTS)
        if self.reduce_dtype is not None:
            _require_choice("reduce_dtype", self.reduce_dtype, tuple(DTYPE_BYTES))
        _require_choice("backward_kv", self.backward_kv, ("refetch", "keep"))
        _require_choice("kernel", self.kernel, KERNELS)
        find_rates(self.hardware)

    @property
    def rates(self) -> Rates:
        """The rates of ``hardware``."""
        return find_rates(self.hardware)

    def with_changes(self, **changes: object) -> DcpConfig:
        """A copy with the named fields changed. Raises ValueError for a name that is no field."""
        known = {f.name for f in fields(self)}
        for name in changes:
            if name not in known:
                raise ValueError(f"DcpConfig has no field {name!r}; its fields are {', '.join(sorted(known))}")
        return replace(self, **changes)  # type: ignore[arg-type]


def _require_count(name: str, value: object, auto: bool = False) -> None:
    if auto and value == "auto":
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        choices = 'an integer of at least 1 or "auto"' if auto else "an integer of at least 1"
        raise ValueError(f"{name} must be {choices}, not {value!r}")


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
