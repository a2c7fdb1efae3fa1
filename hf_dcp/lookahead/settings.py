"""What plans are made for, and the key that names a batch wherever its plan is the same."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict, dataclass
from importlib import metadata

from hf_dcp.config import DcpConfig
from hf_dcp.lookahead.store import StoreAddress
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.plan import SCHEMA


@dataclass(frozen=True)
class PlanSettings:
    """What plans are made for, and where they are exchanged.

    Args:
        rank: this rank inside the DCP group.
        communicator: id of the group's communicator, None for a group of one.
        address: of the plan store.
        timeout: most seconds to wait for a plan of another rank before it is made here; see `Patience`.
        cache_size: plans kept by each process.
        keep: iterations for which a plan stays in the store.
    """

    topology: Topology
    shape: ModelShape
    config: DcpConfig
    rank: int
    communicator: int | None
    address: StoreAddress
    timeout: float = 60.0
    cache_size: int = 16
    keep: int = 32


def plan_key(batch: BatchSpec, settings: PlanSettings) -> bytes:
    """32 bytes that name a batch: equal where the plan is, on every rank and after every restart."""
    text = json.dumps(
        {
            "batch": [[length, mask.key(length)] for length, mask in zip(batch.lengths, batch.masks)],
            "topology": asdict(settings.topology),
            "shape": asdict(settings.shape),
            "config": asdict(settings.config),
            "versions": versions(),
        },
        sort_keys=True,
    )
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


@functools.cache
def versions() -> dict[str, str]:
    """Versions that a plan depends on."""
    found = {"schema": str(SCHEMA)}
    for name in ("hf-dcp", "mtkahypar", "kahypar", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found
