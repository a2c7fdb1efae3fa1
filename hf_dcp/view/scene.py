"""What a picture of a plan shows, read off the rank plans: tiles, owners, bytes between devices, and a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_dcp.planning.batch import RowBytes
from hf_dcp.planning.plan import PASSES, Item, Message, Op, PassPlan, RankPlan, Slice, WindowPlan
from hf_dcp.planning.simulate import Rates, message_bytes, simulate
from hf_dcp.view.colours import device_colours

Polygon = list[int]
"""q, k, q, k, ... of its corners, in tokens of the sequence."""


@dataclass(frozen=True)
class Tile:
    """A rectangle of one sequence's attention matrix that one device computes; tokens count from the sequence's first."""

    sequence: int
    group: int
    """Head group."""
    device: int
    forward: int
    """Division that computes it in forward."""
    backward: int
    q: int
    q_count: int
    k: int
    k_count: int
    polygons: list[Polygon]
    """What is attended to inside; empty: everything."""


@dataclass(frozen=True)
class SequenceView:
    """One sequence: its length, and (first token, tokens, device) of the runs that devices own."""

    length: int
    owners: list[tuple[int, int, int]]


@dataclass(frozen=True)
class PassView:
    """Forward or backward."""

    seconds: float
    """Predicted, as is the timeline."""
    bytes: list[list[int]]
    """Of one layer, from row to column."""
    divisions: int
    spans: list[tuple[int, str, int, float, float]]
    """(device, "attend" or "wait" or "reduce", its number, begin, end) in seconds; what takes no time is left out."""


@dataclass(frozen=True)
class Scene:
    """All of it, ready to be drawn, or written as JSON."""

    nodes: list[int]
    colours: list[str]
    groups: int
    sequences: list[SequenceView]
    tiles: list[Tile]
    passes: dict[str, PassView]

    @property
    def tokens(self) -> int:
        return sum(sequence.length for sequence in self.sequences)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; tiles are lists in the order of their fields, as there are many."""
        plain = asdict(self)
        plain["tiles"] = [list(tile.values()) for tile in plain["tiles"]]
        return plain


def make_scene(
    plans: Sequence[RankPlan], rates: Rates, window: int | None = None, lengths: Sequence[int] | None = None
) -> Scene:
    """
    Args:
        plans: of all ranks, in order.
        window: of the layers that are shown.
        lengths: of the sequences; None: tokens that are connected by attention make a sequence.

    Raises:
        ValueError: if the plans have no part for the window.
    """
    parts = [plan.window(window) for plan in plans]
    bounds = _bounds(parts, plans[0].num_tokens) if lengths is None else np.concatenate([[0], np.cumsum(lengths)])
    return Scene(
        nodes=list(plans[0].node_of_rank),
        colours=device_colours(plans[0].node_of_rank),
        groups=plans[0].head_groups,
        sequences=_sequences(plans, bounds),
        tiles=[tile for plan, part in zip(plans, parts) for tile in _tiles(plan, part, bounds)],
        passes={which: _pass(plans, parts, which, rates, window) for which in PASSES},
    )


def read_plans(folder: Path) -> list[RankPlan]:
    """The rank plans that ``hf-dcp plan --save`` has written.

    Raises:
        ValueError: if they aren't all there, or are something else.
    """
    files = sorted(folder.glob("rank_*.safetensors")) if folder.is_dir() else []
    if not files:
        raise ValueError(
            f"{folder} holds no rank plans: give a folder that hf-dcp plan --save has written, or --lengths"
        )
    try:
        plans = [RankPlan.from_bytes(file.read_bytes()) for file in files]
    except ValueError as error:
        raise ValueError(
            f"{folder} holds something else than rank plans ({error}): write it with hf-dcp plan --save"
        ) from error
    if [plan.rank for plan in plans] != list(range(plans[0].world_size)) or len({plan.digest for plan in plans}) > 1:
        raise ValueError(f"{folder} holds the rank plans of several plans, or not all of one: save to an empty folder")
    return plans


def _bounds(parts: Sequence[WindowPlan], tokens: int) -> np.ndarray:
    """Where sequences begin, and the number of tokens: no item reaches over a bound."""
    joined = np.zeros(tokens + 1, np.int64)
    for part in parts:
        items = part.items.astype(np.int64)
        first = np.minimum(items[:, Item.Q_TOKEN], items[:, Item.KV_TOKEN])
        last = np.maximum(
            items[:, Item.Q_TOKEN] + items[:, Item.Q_COUNT], items[:, Item.KV_TOKEN] + items[:, Item.KV_COUNT]
        )
        np.add.at(joined, first + 1, 1)
        np.add.at(joined, last, -1)
    return np.flatnonzero(np.cumsum(joined) == 0)


def _sequences(plans: Sequence[RankPlan], bounds: np.ndarray) -> list[SequenceView]:
    owners: list[list[tuple[int, int, int]]] = [[] for _ in bounds[1:]]
    for plan in plans:
        for begin, count in plan.token_runs.tolist():
            while count:
                s = int(np.searchsorted(bounds, begin, "right")) - 1
                here = min(count, int(bounds[s + 1]) - begin)
                owners[s].append((begin - int(bounds[s]), here, plan.rank))
                begin, count = begin + here, count - here
    return [SequenceView(int(n), sorted(runs)) for n, runs in zip(np.diff(bounds), owners)]


def _tiles(plan: RankPlan, part: WindowPlan, bounds: np.ndarray) -> list[Tile]:
    items = part.items.astype(np.int64)
    groups, forward, backward = _groups(plan, part), _divisions(part.forward), _divisions(part.backward)
    sequence = np.searchsorted(bounds, items[:, Item.Q_TOKEN], "right") - 1
    tiles = []
    for i, item in enumerate(items):
        start = int(bounds[sequence[i]])
        slices = part.slices[item[Item.SLICE_BEGIN] : item[Item.SLICE_END]].astype(np.int64)
        tiles.append(
            Tile(
                int(sequence[i]), int(groups[i]), plan.rank, int(forward[i]), int(backward[i]),
                int(item[Item.Q_TOKEN]) - start, int(item[Item.Q_COUNT]),
                int(item[Item.KV_TOKEN]) - start, int(item[Item.KV_COUNT]),
                [shape for one in slices if (shape := _polygon(item, one, start))],
            )
        )  # fmt: skip
    return tiles


def _groups(plan: RankPlan, part: WindowPlan) -> np.ndarray:
    """int64[items]: the head group of each item, from the slot of its first Q row."""
    slot, local = part.items[:, Item.Q_SLOT].astype(np.int64), plan.num_local * plan.head_groups
    if not len(part.q_remote):
        return slot % plan.head_groups
    last = np.cumsum(part.q_remote[:, 1].astype(np.int64))
    run = np.clip(np.searchsorted(last, slot - local, "right"), 0, len(last) - 1)
    return np.where(slot < local, slot % plan.head_groups, part.q_remote[run, 2])


def _divisions(one: PassPlan) -> np.ndarray:
    """int64[items]: the division that computes each item."""
    division = np.empty(len(one.order), np.int64)
    division[one.order] = np.repeat(np.arange(len(one.divisions) - 1), np.diff(one.divisions))
    return division


def _polygon(item: np.ndarray, one: np.ndarray, start: int) -> Polygon:
    """A slice inside an item's rectangle: corners down its left border and up its right one; empty if nothing is left."""
    top = max(item[Item.Q_TOKEN], one[Slice.Q_BEGIN])
    end = min(item[Item.Q_TOKEN] + item[Item.Q_COUNT], one[Slice.Q_END])
    left, right = item[Item.KV_TOKEN], item[Item.KV_TOKEN] + item[Item.KV_COUNT]

    def border(column: int, slope: int, q: int) -> int:
        return int(np.clip(one[column] + (q - one[Slice.Q_BEGIN]) * one[slope], left, right))

    turns = {int(top), int(end)}
    for column, slope in ((Slice.LO, Slice.LO_SLOPE), (Slice.HI, Slice.HI_SLOPE)):
        if one[slope]:  # where a slanted border meets a side of the rectangle
            turns |= {int(side - one[column] + one[Slice.Q_BEGIN]) for side in (left, right)}
    rows = sorted(q for q in turns if top <= q <= end)
    lo = [(q, border(Slice.LO, Slice.LO_SLOPE, q)) for q in rows]
    hi = [(q, border(Slice.HI, Slice.HI_SLOPE, q)) for q in rows]
    if len(rows) < 2 or all(a[1] >= b[1] for a, b in zip(lo, hi)):
        return []
    return [value for q, k in [*lo, *hi[::-1]] for value in (q - start, k - start)]


def _pass(
    plans: Sequence[RankPlan], parts: Sequence[WindowPlan], which: str, rates: Rates, window: int | None
) -> PassView:
    row = RowBytes.of(plans[0].shape, plans[0].head_groups, plans[0].reduce_dtype)
    programs = [part.forward if which == "forward" else part.backward for part in parts]
    matrix = np.zeros((len(plans), len(plans)), np.int64)
    for rank, program in enumerate(programs):
        sent = program.messages[:, Message.INCOMING] == 0
        np.add.at(matrix[rank], program.messages[sent, Message.PEER], message_bytes(program, row, which)[sent])
    spans: list[tuple[int, str, int, float, float]] = []

    def record(rank: int, op: Op, argument: int, begin: float, end: float) -> None:
        if end > begin:
            spans.append((rank, op.name.lower(), argument, begin, end))

    seconds = simulate(plans, which, rates, window, record).total_s
    return PassView(seconds, matrix.tolist(), max(len(p.divisions) - 1 for p in programs), spans)
