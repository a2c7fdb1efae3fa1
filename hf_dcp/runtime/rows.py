"""Rows of one tensor on one rank: its local tokens and the remote rows of a plan, under one numbering.

The three ways to name rows, all of one head group at a time:

- a **slot**, as plans do: local token i of group g has slot ``i * groups + g``, remote rows follow;
- a **place**, as `hf_dcp.runtime.calls` does: consecutive tokens have consecutive places;
- an `Index` of slots, prepared once per plan, for the rows of a message.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hf_dcp.planning.plan import RankPlan
from hf_dcp.runtime.calls import Call


@dataclass
class Rows:
    """One tensor's local and remote rows.

    Args:
        local: [heads, S, D], or [heads, S] for a statistic; any strides. S is at least ``num_local``.
        remote: [remote rows, heads / groups, D], or without D; contiguous.
        num_local: local tokens; local rows behind them are dummies.
        groups: head groups.
    """

    local: Tensor
    remote: Tensor
    num_local: int
    groups: int

    @property
    def heads(self) -> int:
        """Heads of one group."""
        return self.local.shape[0] // self.groups

    def at(self, group: int, begin: int, end: int) -> Tensor:
        """View of the rows at places [begin, end): [heads of a group, end - begin, ...]."""
        if begin < self.num_local:
            return self.local[group * self.heads : (group + 1) * self.heads, begin:end]
        shift = self.num_local + 1
        return self.remote[begin - shift : end - shift].transpose(0, 1)

    def repeated(self, group: int, places: tuple[int, int], count: int, step: int) -> Tensor:
        """View of rows ``count`` times, ``step`` places further each time: [count, heads of a group, rows, ...]."""
        once = self.at(group, *places)
        if count == 1:
            return once[None]
        strides = (step * once.stride(1), *once.stride())
        return once.as_strided((count, *once.shape), strides, once.storage_offset())

    def gather(self, call: Call) -> Tensor:
        """The rows at all columns of a call: [count, heads of a group, columns, ...]; a view if they are one interval."""
        views = [self.repeated(call.group, one, call.count, step) for one, step in call.columns()]
        return views[0] if len(views) == 1 else torch.cat(views, 2)

    def scatter_add(self, call: Call, values: Tensor) -> None:
        """Add ``values`` [count, heads of a group, columns, ...] to the rows at the columns of a call."""
        first = 0
        for (begin, end), step in call.columns():
            part = values[:, :, first : first + end - begin]
            first += end - begin
            if step == 0:
                self.at(call.group, begin, end).add_(part[0] if call.count == 1 else part.sum(0))
                continue
            turns = min(-(-(end - begin) // step), call.count)  # rows of one turn don't overlap
            for n in range(turns):
                own = part[n::turns]
                places = (begin + n * step, end + n * step)
                self.repeated(call.group, places, len(own), turns * step).add_(own)

    def flat(self) -> Tensor:
        """Local rows by slot: [num_local * groups, heads of a group, ...]; a view where strides allow."""
        local = self.local[:, : self.num_local].transpose(0, 1)
        return local.reshape(self.num_local * self.groups, self.heads, *local.shape[2:])

    def writable_flat(self) -> Tensor:
        """Like `flat`, always a view; for accumulators, which have tokens outside."""
        local = self.local[:, : self.num_local].transpose(0, 1)
        return local.view(self.num_local * self.groups, self.heads, *local.shape[2:])


@dataclass(frozen=True)
class _Segment:
    """Consecutive rows of an index that lie on one side."""

    begin: int
    end: int
    remote: bool
    select: slice | Tensor
    """Which flat local rows, or remote rows: a slice where they are evenly spaced, else int64 indices."""


@dataclass(frozen=True)
class Index:
    """An ordered list of slots, ready to read from and to write to `Rows`."""

    count: int
    segments: tuple[_Segment, ...]

    @classmethod
    def of(cls, plan: RankPlan, runs: np.ndarray, device: torch.device) -> Index:
        """The index of runs (slot, count), int32[runs, 2]."""
        slots = plan.slots(runs)
        base = plan.num_local * plan.head_groups
        remote = slots >= base
        bounds = [0, *(np.flatnonzero(remote[1:] != remote[:-1]) + 1).tolist(), len(slots)] if len(slots) else [0]
        segments = []
        for begin, end in pairwise(bounds):
            side = bool(remote[begin])
            segments.append(_Segment(begin, end, side, _select(slots[begin:end] - side * base, device)))
        return cls(len(slots), tuple(segments))

    def read(self, rows: Rows, out: Tensor) -> None:
        """Copy the rows, in order, to ``out`` [count, heads of a group, ...], casting if its dtype differs."""
        for segment, source in self._sources(rows):
            target = out[segment.begin : segment.end]
            if isinstance(segment.select, slice):
                target.copy_(source[segment.select])
            elif target.dtype == source.dtype:
                torch.index_select(source, 0, segment.select, out=target)
            else:
                target.copy_(source.index_select(0, segment.select))

    def write(self, rows: Rows, values: Tensor) -> None:
        """Copy ``values`` [count, ...] to the rows."""
        for segment, target in self._targets(rows):
            part = values[segment.begin : segment.end]
            if isinstance(segment.select, slice):
                target[segment.select].copy_(part)
            else:
                target.index_copy_(0, segment.select, part.to(target.dtype))

    def add(self, rows: Rows, values: Tensor) -> None:
        """Add ``values`` [count, ...] to the rows; no slot may occur twice."""
        for segment, target in self._targets(rows):
            part = values[segment.begin : segment.end]
            if isinstance(segment.select, slice):
                target[segment.select].add_(part)
            else:
                target.index_add_(0, segment.select, part.to(target.dtype))

    def _sources(self, rows: Rows) -> Iterator[tuple[_Segment, Tensor]]:
        flat = rows.flat() if not all(segment.remote for segment in self.segments) else rows.remote
        for segment in self.segments:
            yield segment, rows.remote if segment.remote else flat

    def _targets(self, rows: Rows) -> Iterator[tuple[_Segment, Tensor]]:
        for segment in self.segments:
            yield segment, rows.remote if segment.remote else rows.writable_flat()


def _select(rows: np.ndarray, device: torch.device) -> slice | Tensor:
    """A slice if the rows are evenly spaced and ascending, else their indices."""
    if len(rows) == 1:
        return slice(int(rows[0]), int(rows[0]) + 1)
    step = int(rows[1] - rows[0])
    if step > 0 and bool((np.diff(rows) == step).all()):
        return slice(int(rows[0]), int(rows[-1]) + 1, step)
    return torch.from_numpy(rows).to(device)
