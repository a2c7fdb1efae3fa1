"""What a plan is made for: the batch, the devices, and the attention of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hf_dcp.config import DTYPE_BYTES
from hf_dcp.masks import Mask, normalise


@dataclass(frozen=True)
class BatchSpec:
    """The sequences of one batch of a DCP group: lengths in tokens, and a mask each.

    Args:
        lengths: tokens of each sequence, all at least 1.
        masks: one mask for all sequences, or as many masks as sequences.

    Raises:
        ValueError: for an empty batch, a length below 1, or a wrong number of masks.
    """

    lengths: tuple[int, ...]
    masks: tuple[Mask, ...]

    def __init__(self, lengths: Sequence[int], masks: Mask | Sequence[Mask]) -> None:
        checked = tuple(_length(i, value) for i, value in enumerate(lengths))
        if not checked:
            raise ValueError("lengths is empty: a batch needs at least one sequence")
        each = (masks,) * len(checked) if isinstance(masks, Mask) else tuple(masks)
        if len(each) != len(checked):
            raise ValueError(f"masks has {len(each)} entries for {len(checked)} sequences: give one mask, or one each")
        object.__setattr__(self, "lengths", checked)
        object.__setattr__(self, "masks", each)

    def __reduce__(self) -> tuple:
        return BatchSpec, (self.lengths, self.masks)  # what is cached stays where it was computed

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def starts(self) -> np.ndarray:
        """First batch-global token of each sequence, and the number of tokens: int64[sequences + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)

    @cached_property
    def ranges(self) -> tuple[np.ndarray, ...]:
        """Normalised KV ranges of each sequence, int32[length, R, 2]; equal sequences share one array."""
        known: dict[tuple[int, str], np.ndarray] = {}
        result = []
        for length, mask in zip(self.lengths, self.masks, strict=True):
            key = (length, mask.key(length))
            if key not in known:
                known[key] = normalise(mask.ranges(length))
            result.append(known[key])
        return tuple(result)


def _length(i: int, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"lengths[{i}] must be an integer of at least 1, not {value!r}: leave empty sequences out")
    return int(value)


@dataclass(frozen=True)
class Topology:
    """Where the ranks of a DCP group live, and how fast their links are.

    Args:
        node_of_rank: the node index of each rank; nodes may be uneven and their ranks need not be neighbours.
        inter_cost: relative cost of a byte between nodes, against ``intra_cost`` for one inside a node: the
            1 / beta of the design's cost, as integers so that costs stay exact. Default 4 : 1.
    """

    node_of_rank: tuple[int, ...]
    inter_cost: int = 4
    intra_cost: int = 1

    def __post_init__(self) -> None:
        if not self.node_of_rank:
            raise ValueError("node_of_rank is empty: a group has at least one rank")
        if sorted(set(self.node_of_rank)) != list(range(max(self.node_of_rank) + 1)):
            raise ValueError(f"node_of_rank must name the nodes 0, 1, 2, ... without a gap, not {self.node_of_rank}")
        for name in ("inter_cost", "intra_cost"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")

    @classmethod
    def grid(cls, nodes: int, devices_per_node: int) -> Topology:
        """``nodes`` equal nodes with neighbouring ranks."""
        for name, value in (("nodes", nodes), ("devices_per_node", devices_per_node)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")
        return cls(tuple(i // devices_per_node for i in range(nodes * devices_per_node)))

    @classmethod
    def from_hosts(cls, hosts: Sequence[str]) -> Topology:
        """The topology of a group from the host name of each rank; nodes are numbered as they first appear."""
        index: dict[str, int] = {}
        return cls(tuple(index.setdefault(host, len(index)) for host in hosts))

    @property
    def world_size(self) -> int:
        return len(self.node_of_rank)

    @property
    def num_nodes(self) -> int:
        return max(self.node_of_rank) + 1

    @cached_property
    def node(self) -> np.ndarray:
        """``node_of_rank`` as int32[world_size]."""
        return np.array(self.node_of_rank, np.int32)


@dataclass(frozen=True)
class ModelShape:
    """The attention of a model, as far as a plan depends on it.

    Args:
        heads: query heads.
        kv_heads: KV heads; they divide ``heads``.
        head_dim: elements of a head, the same for Q, K and V.
        dtype: type of Q, K and V, a key of ``hf_dcp.config.DTYPE_BYTES``.
        windows: (sliding window in tokens, or None; number of layers that have it), each window once.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bf16"
    windows: tuple[tuple[int | None, int], ...] = field(default=((None, 1),))

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads ({self.heads}), which {self.kv_heads} does not")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, not {self.dtype!r}")
        seen = [window for window, _ in self.windows]
        if not seen or len(set(seen)) != len(seen):
            raise ValueError(f"windows must name each window once, and at least one, not {seen}")
        for window, layers in self.windows:
            if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
                raise ValueError(f"a window must be an integer of at least 1, or None for no window, not {window!r}")
            if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
                raise ValueError(f"the number of layers of window {window} must be at least 1, not {layers!r}")


@dataclass(frozen=True)
class RowBytes:
    """Bytes of one token row of one head group, by what travels (the byte rules of docs/design.md)."""

    q: int
    """Q, and dO, and with ``reduce_dtype`` equal to the dtype also O and dQ: hDe."""
    kv: int
    """K and V: 2De per KV head."""
    partial_q: int
    """A partial O or dQ, without lse: hDr."""
    partial_kv: int
    """Partial dK and dV: 2Dr per KV head."""
    stat: int
    """One fp32 per query head: lse, or delta."""

    @classmethod
    def of(cls, shape: ModelShape, head_groups: int, reduce_dtype: str | None = None) -> RowBytes:
        heads, kv_heads = shape.heads // head_groups, shape.kv_heads // head_groups
        element, partial = DTYPE_BYTES[shape.dtype], DTYPE_BYTES[reduce_dtype or shape.dtype]
        return cls(
            q=heads * shape.head_dim * element,
            kv=2 * kv_heads * shape.head_dim * element,
            partial_q=heads * shape.head_dim * partial,
            partial_kv=2 * kv_heads * shape.head_dim * partial,
            stat=4 * heads,
        )

    def inputs(self, name: str) -> tuple[int, int]:
        """Bytes per (Q row, KV row) sent towards the tiles in ``"forward"``, ``"backward"`` or ``"backward_keep"``."""
        return {
            "forward": (self.q, self.kv),
            "backward": (2 * self.q + 2 * self.stat, self.kv),
            "backward_keep": (self.q + 2 * self.stat, 0),
        }[name]

    def partials(self, name: str) -> tuple[int, int]:
        """Bytes per (Q row, KV row) of partial results sent back in the named pass."""
        return (self.partial_q + self.stat, 0) if name == "forward" else (self.partial_q, self.partial_kv)
