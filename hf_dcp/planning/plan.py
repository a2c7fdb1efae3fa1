"""Plans: what every rank does in attention, as arrays.

A `RankPlan` is all that a rank needs. It is small, it is data (safetensors bytes), and its meaning is defined by
`hf_dcp.planning.reference`, which executes the plans of all ranks in numpy.

**Rows.** A row is one token of one head group: [heads / G, D] of Q, or [2, kv_heads / G, D] of K and V. A rank numbers
the rows it holds by **slots**: local token ``i`` of group ``g`` has slot ``i * G + g``, on the Q and on the KV side;
behind these ``num_local * G`` slots come remote rows, sorted by (group, token), listed in ``q_remote`` and ``kv_remote``.
A **run** (slot, count) means ``count`` rows of one group at consecutive tokens: slots ``slot, slot + step, ...`` where
``step`` is G for local rows and 1 for remote ones.

**Items.** An item is a rectangle of the attention matrix of one head group: a run of Q rows times a run of KV rows, with
the mask of its slices, or none if it is full.

**Passes.** Forward and backward each have a program of instructions over exchanges, divisions and messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from hf_dcp.config import DcpConfig
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology

if TYPE_CHECKING:
    from hf_dcp.planning.objective import Score
    from hf_dcp.planning.placement import Placement
    from hf_dcp.planning.tiles import Blocks, Tiles

SCHEMA = 1
PASSES = ("forward", "backward")


class Op(IntEnum):
    """Instructions of a program; each has one argument."""

    START = 0
    """Gather the rows of all messages of exchange x and post them, every receive before any send."""
    ATTEND = 1
    """Compute the items of division d and merge them into the accumulators of their rows."""
    WAIT = 2
    """Complete exchange x and unpack received input rows into their slots."""
    REDUCE = 3
    """Add (forward: merge by lse) the partial results received in exchange x, in message order, in fp32."""
    FINISH = 4
    """Final reduction of the local rows: normalise and cast. The argument is 0."""


class Item(IntEnum):
    """Columns of ``WindowPlan.items``."""

    Q_SLOT = 0
    Q_COUNT = 1
    KV_SLOT = 2
    KV_COUNT = 3
    Q_TOKEN = 4
    """Batch-global token of the first Q row."""
    KV_TOKEN = 5
    SLICE_BEGIN = 6
    """First of the slices that mask this item; equal to SLICE_END: every element is attended to."""
    SLICE_END = 7


class Slice(IntEnum):
    """Columns of ``WindowPlan.slices``: query tokens q in [Q_BEGIN, Q_END) attend to [lo, hi), batch-global tokens,
    with lo = LO + (q - Q_BEGIN) * LO_SLOPE and hi = HI + (q - Q_BEGIN) * HI_SLOPE; slopes are 0 or 1."""

    Q_BEGIN = 0
    Q_END = 1
    LO = 2
    HI = 3
    LO_SLOPE = 4
    HI_SLOPE = 5


class Message(IntEnum):
    """Columns of ``PassPlan.messages``, which are sorted by (exchange, partial, incoming, peer)."""

    EXCHANGE = 0
    PEER = 1
    """Rank inside the DCP group."""
    INCOMING = 2
    """1: this rank receives from the peer; 0: it sends to the peer."""
    PARTIAL = 3
    """0: inputs travel towards tiles (forward: Q, KV; backward: Q, dO, lse, delta, KV).
    1: partial results travel back (forward: O, lse; backward: dQ, and dK and dV)."""
    Q_BEGIN = 4
    """First of its runs in ``q_runs``; message order is row order, the same on both sides."""
    Q_END = 5
    KV_BEGIN = 6
    KV_END = 7


@dataclass(frozen=True)
class PassPlan:
    """One rank's program for forward or for backward."""

    program: np.ndarray
    """int32[instructions, 2]: (Op, argument)."""
    order: np.ndarray
    """int32[items]: the items in the order of computation."""
    divisions: np.ndarray
    """int32[divisions + 1]: division d computes ``order[divisions[d] : divisions[d + 1]]``."""
    messages: np.ndarray
    """int32[messages, 8], columns `Message`."""
    q_runs: np.ndarray
    """int32[runs, 2]: (slot, count)."""
    kv_runs: np.ndarray
    """int32[runs, 2]: (slot, count)."""


@dataclass(frozen=True)
class WindowPlan:
    """One rank's work for the layers of one sliding window (or of none)."""

    window: int | None
    q_remote: np.ndarray
    """int32[runs, 3]: (token, count, group) of the remote Q rows, in slot order."""
    kv_remote: np.ndarray
    """int32[runs, 3]: (token, count, group) of the remote KV rows, in slot order."""
    items: np.ndarray
    """int32[items, 8], columns `Item`."""
    slices: np.ndarray
    """int32[slices, 6], columns `Slice`."""
    forward: PassPlan
    backward: PassPlan

    def passes(self) -> Iterator[tuple[str, PassPlan]]:
        yield "forward", self.forward
        yield "backward", self.backward


@dataclass(frozen=True)
class RankPlan:
    """All that one rank needs to place its tokens and to run attention on one batch."""

    rank: int
    node_of_rank: tuple[int, ...]
    digest: int
    """64 bits over the plans of all ranks: equal on all ranks of a group that may exchange rows."""
    num_tokens: int
    """Tokens of the whole batch."""
    shape: ModelShape
    head_groups: int
    reduce_dtype: str
    token_runs: np.ndarray
    """int32[runs, 2]: (batch-global token, count) of the local tokens, in local order, ascending."""
    windows: tuple[WindowPlan, ...]

    @property
    def world_size(self) -> int:
        return len(self.node_of_rank)

    @property
    def num_local(self) -> int:
        """Local tokens; may be 0."""
        return int(self.token_runs[:, 1].sum())

    def local_tokens(self) -> np.ndarray:
        """Batch-global index of every local token, in local order: int64[num_local]."""
        return expand_runs(self.token_runs[:, 0], self.token_runs[:, 1])

    def slots(self, runs: np.ndarray) -> np.ndarray:
        """Slots of every row of the runs (slot, count), in order: int64[rows]."""
        step = np.where(runs[:, 0] < self.num_local * self.head_groups, self.head_groups, 1)
        return expand_runs(runs[:, 0], runs[:, 1], step)

    def window(self, window: int | None) -> WindowPlan:
        """The part for layers with this sliding window. Raises ValueError if the plan has none."""
        for part in self.windows:
            if part.window == window:
                return part
        have = ", ".join(str(part.window) for part in self.windows)
        raise ValueError(f"the plan has no part for sliding window {window}, only for {have}: name it in the windows")

    def to_bytes(self) -> bytes:
        """The plan as safetensors bytes: the same bytes for the same plan, always."""
        from hf_dcp.planning.codec import encode

        return encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> RankPlan:
        """Inverse of `to_bytes`; the bytes are only data, nothing in them is executed.

        Raises:
            ValueError: if the bytes are no rank plan, or one of another schema version.
        """
        from hf_dcp.planning.codec import decode

        return decode(data)


def expand_runs(start: np.ndarray, count: np.ndarray, step: np.ndarray | int = 1) -> np.ndarray:
    """[start, start + step, ...] of ``count`` elements for every run, concatenated: int64[sum(count)]."""
    count = np.asarray(count, np.int64)
    step = np.broadcast_to(np.asarray(step, np.int64), count.shape)
    first = np.cumsum(count) - count
    within = np.arange(int(count.sum()), dtype=np.int64) - np.repeat(first, count)
    return np.repeat(np.asarray(start, np.int64), count) + within * np.repeat(step, count)


@dataclass(frozen=True)
class Plan:
    """A planned batch: the rank plans, and everything that they were made from."""

    batch: BatchSpec
    topology: Topology
    shape: ModelShape
    config: DcpConfig
    blocks: Blocks
    tiles: tuple[Tiles, ...]
    """One entry per window of ``shape``."""
    placement: Placement
    score: Score
    rank_plans: tuple[RankPlan, ...]
    cpu_s: dict[str, float] = field(compare=False)
    """CPU seconds of this process by step: tiles, placement, schedule, serialise."""

    @property
    def digest(self) -> int:
        """64 bits over all rank plans."""
        return self.rank_plans[0].digest

    @property
    def head_groups(self) -> int:
        return self.rank_plans[0].head_groups

    def rank(self, rank: int) -> RankPlan:
        return self.rank_plans[rank]

    def check(self) -> None:
        """Raise `hf_dcp.planning.check.PlanError` unless the rank plans compute this batch's attention exactly."""
        from hf_dcp.planning.check import check

        check(self.batch, self.rank_plans)
