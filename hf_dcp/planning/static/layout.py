"""Where a static scheme puts tokens, and how its ranks form rings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hf_dcp.masks import Mask, from_ranges
from hf_dcp.planning.batch import BatchSpec, Topology
from hf_dcp.planning.tiles import Blocks, make_blocks


@dataclass(frozen=True)
class Scheme:
    """One way of static context parallelism."""

    zigzag: bool
    """A rank has chunks i and 2R - 1 - i of every sequence in place of chunk i of R: balanced for causal masks."""
    heads: bool
    """Neighbouring ranks form teams that exchange heads for tokens; rings connect the members of teams."""
    double: bool
    """Rings run inside a node, and whole nodes in a ring around them."""
    pads_to_longest: bool = False
    """All sequences get the length of the longest, not only a multiple of the chunks."""


SCHEMES = {
    "ring": Scheme(zigzag=False, heads=False, double=False),
    "zigzag": Scheme(zigzag=True, heads=False, double=False),
    "head-ring": Scheme(zigzag=True, heads=True, double=False),
    "loongtrain": Scheme(zigzag=True, heads=True, double=True, pads_to_longest=True),
}


def find_scheme(name: str) -> Scheme:
    """Raises ValueError for an unknown name."""
    if name not in SCHEMES:
        raise ValueError(f"the static scheme must be one of {', '.join(SCHEMES)}, not {name!r}")
    return SCHEMES[name]


@dataclass(frozen=True)
class Grid:
    """The ranks of a group as ``positions`` of a ring, each a team of ``team`` ranks that split the heads.

    KV of position b is computed with at position ``walk(b, t)`` in step t; it visits every position once. A double ring
    makes ``inner`` steps inside a node before it goes on to the next one.
    """

    ranks: np.ndarray
    """int32[positions, team]: the rank of every member, neighbours on a node next to each other."""
    node: np.ndarray
    """int32[world_size]: node of every rank."""
    inner: int
    """Positions of an inner ring; as many as there are positions: one simple ring."""

    @classmethod
    def of(
        cls, scheme: Scheme, topology: Topology, kv_heads: int, team: int | None = None, inner: int | None = None
    ) -> Grid:
        """
        Args:
            team: ranks that split the heads; None: the most that KV heads allow, inside a node if any fit there.
            inner: positions of an inner ring, for schemes with a double ring; None: as many as fit in a node.

        Raises:
            ValueError: if ``team`` doesn't divide the KV heads and the ranks, or ``inner`` the positions.
        """
        world = topology.world_size
        possible = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and world % n == 0]
        order = np.argsort(topology.node, kind="stable").astype(np.int32)
        if not scheme.heads:
            possible = [1]
        elif team is None:
            inside = [n for n in possible if n > 1 and _stay_inside(topology.node[order], n)]
            possible = inside or possible
        if team is not None and team not in possible:
            raise ValueError(f"team must be one of {possible} (a divisor of KV heads and of ranks), not {team}")
        chosen = team or possible[-1]
        positions = world // chosen
        if inner is not None and (not scheme.double or inner < 1 or positions % inner):
            only = f"divide the {positions} positions of the ring" if scheme.double else "be None for a simple ring"
            raise ValueError(f"inner must {only}, which {inner} does not")
        if inner is None:
            inner = _inner_ring(topology, chosen) if scheme.double else positions
        return cls(order.reshape(-1, chosen), topology.node, inner)

    @property
    def positions(self) -> int:
        return self.ranks.shape[0]

    @property
    def team(self) -> int:
        return self.ranks.shape[1]

    @property
    def outer(self) -> int:
        """Inner rings that one KV row visits."""
        return self.positions // self.inner

    def walk(self, position: np.ndarray, step: int) -> np.ndarray:
        """The position that computes with the KV of ``position`` in this step; at last, step ``positions``, home."""
        step %= self.positions
        ring, within = position // self.inner, position % self.inner
        return (ring + step // self.inner) % self.outer * self.inner + (within + step % self.inner) % self.inner

    def hops(self) -> Iterator[tuple[int, int]]:
        """How KV travels: (step whose position sends it, as that step begins; step whose position has to have it).

        Inside an inner ring it goes on from step to step; to the next inner ring it goes ahead, behind all its steps.
        """
        for step in range(1, self.positions):
            yield (step - 1 if step % self.inner else step - self.inner), step

    def return_hops(self) -> Iterator[tuple[int, int]]:
        """How dKV travels, from the position of a step to that of the next, and home."""
        if self.positions > 1:
            yield from ((step, step + 1) for step in range(self.positions))

    @cached_property
    def index(self) -> np.ndarray:
        """int32[world_size, 2]: position and team member of every rank."""
        found = np.empty((self.ranks.size, 2), np.int32)
        for member, at in np.ndenumerate(self.ranks):
            found[at] = member
        return found


def _stay_inside(node: np.ndarray, team: int) -> bool:
    teams = node.reshape(-1, team)
    return bool((teams == teams[:, :1]).all())


def _inner_ring(topology: Topology, team: int) -> int:
    """Positions on a node where nodes are equal and hold whole teams, else 1: every hop is one of the outer ring."""
    per_node = np.bincount(topology.node)
    equal = bool((per_node == per_node[0]).all())
    return int(per_node[0]) // team if equal and per_node[0] % team == 0 else 1


def chunks(scheme: Scheme, world_size: int) -> int:
    """Chunks that every sequence is cut into."""
    return 2 * world_size if scheme.zigzag else world_size


def pad_batch(batch: BatchSpec, scheme: Scheme, world_size: int) -> BatchSpec:
    """The batch as the scheme wants it, with lengths that its chunks divide; padding takes no part in attention."""
    size = chunks(scheme, world_size)
    longest = max(batch.lengths) if scheme.pads_to_longest else 0
    lengths = [-(-max(length, longest) // size) * size for length in batch.lengths]
    known: dict[tuple[str, int, int], Mask] = {}
    padded = []
    for mask, length, target in zip(batch.masks, batch.lengths, lengths, strict=True):
        key = (mask.key(length), length, target)
        if key not in known:
            known[key] = mask if target == length else _padded_mask(mask, length, target)
        padded.append(known[key])
    return BatchSpec(lengths, padded)


def _padded_mask(mask: Mask, length: int, target: int) -> Mask:
    ranges = mask.ranges(length)
    return from_ranges(np.concatenate([ranges, np.zeros((target - length, *ranges.shape[1:]), ranges.dtype)]))


def cut(batch: BatchSpec, scheme: Scheme, grid: Grid) -> tuple[Blocks, np.ndarray]:
    """The chunks of all sequences, and the rank that owns each.

    A length that the chunks don't divide is cut as evenly as possible; a chunk may then be empty, and is left out.

    Returns:
        the blocks, and int32[blocks].
    """
    world = grid.ranks.size
    count = chunks(scheme, world)
    starts, owners = [], []
    for length in batch.lengths:
        bounds = length * np.arange(count + 1, dtype=np.int64) // count
        kept = np.flatnonzero(np.diff(bounds))
        starts.append(bounds[kept])
        owners.append(np.minimum(kept, 2 * world - 1 - kept) if scheme.zigzag else kept)
    return make_blocks(batch, starts), grid.ranks.ravel()[np.concatenate(owners)]
