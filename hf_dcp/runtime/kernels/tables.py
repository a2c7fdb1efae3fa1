"""Block tables: where kernels find rows that were received, without a copy.

All input messages of a pass are received into one buffer, the **arena**, at places that the plan alone decides. A table
says for each remote row of a tensor where in the arena it lies, in units of 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hf_dcp.planning.plan import Message, PassPlan, RankPlan, WindowPlan
from hf_dcp.runtime.calls import places_of
from hf_dcp.runtime.kernels.upload import upload
from hf_dcp.runtime.messages import MessageTable, PreparedMessage

ALIGNMENT = 256
"""Messages begin at multiples of so many bytes."""
UNIT = 16
"""Bytes that offsets count in."""
ROWS = {"q": "q", "grad": "q", "k": "kv", "v": "kv"}
"""Inputs that kernels read in place, and the side that their rows are on."""
Key = tuple[int, int, bool, bool]
"""A message of a pass: exchange, peer, incoming, partial."""


def key_of(message: PreparedMessage) -> Key:
    return message.exchange, message.peer, message.incoming, message.partial


@dataclass(frozen=True)
class BlockTables:
    """The arena of one pass of one window, and what lies where."""

    size: int
    """Bytes of the arena."""
    begin: dict[Key, int]
    """First byte of every incoming message of inputs."""
    offsets: dict[str, Tensor]
    """By input ("q", "k", "v", "grad"): int32[remote rows], -1 for rows that this pass doesn't receive."""
    places: dict[Key, Tensor]
    """By incoming message of partial results: int32[Q rows, 2], place and head group of each."""
    relayed: frozenset[Key]
    """Incoming messages with rows that this rank sends on: these are copied too."""

    @classmethod
    def of(
        cls, plan: RankPlan, part: WindowPlan, one: PassPlan, messages: MessageTable, device: torch.device
    ) -> BlockTables:
        """The tables of one pass (``one``) of a window's part of the plan."""
        slots = _slots(plan, one)
        incoming = [m for group in messages.by_exchange.values() for m in group if m.incoming]
        inputs = [m for m in incoming if not m.partial]
        begin, size = {}, 0
        for message in inputs:
            begin[key_of(message)] = size
            size += -(-message.size // ALIGNMENT) * ALIGNMENT
        offsets = _offsets(plan, part, inputs, begin, slots)
        sent_on = _sent_on(plan, slots)
        relayed = frozenset(
            key_of(m) for m in inputs if any(np.isin(slots[key_of(m)][s], sent_on[s]).any() for s in ("q", "kv"))
        )
        partial = [key_of(m) for m in incoming if m.partial]
        rows = [np.column_stack(places_of(plan, part.q_remote, slots[key]["q"])).astype(np.int32) for key in partial]
        tensors = upload([*offsets.values(), *rows], device)
        named = dict(zip(offsets, tensors))
        return cls(size, begin, named, dict(zip(partial, tensors[len(offsets) :])), relayed)


def _slots(plan: RankPlan, one: PassPlan) -> dict[Key, dict[str, np.ndarray]]:
    """Slots of the rows of every message, by side."""
    found = {}
    for row in one.messages:
        key = (int(row[0]), int(row[1]), bool(row[2]), bool(row[3]))
        found[key] = {
            "q": plan.slots(one.q_runs[row[Message.Q_BEGIN] : row[Message.Q_END]]),
            "kv": plan.slots(one.kv_runs[row[Message.KV_BEGIN] : row[Message.KV_END]]),
        }
    return found


def _offsets(
    plan: RankPlan, part: WindowPlan, inputs: list[PreparedMessage], begin: dict[Key, int], slots: dict
) -> dict[str, np.ndarray]:
    base = plan.num_local * plan.head_groups
    counts = {"q": int(part.q_remote[:, 1].sum()), "kv": int(part.kv_remote[:, 1].sum())}
    offsets = {name: np.full(counts[side], -1, np.int32) for name, side in ROWS.items()}
    for message in inputs:
        for section in message.sections:
            if section.name in ROWS:
                first = begin[key_of(message)] + section.offset
                rows = slots[key_of(message)][ROWS[section.name]] - base
                lies = first + np.arange(len(rows)) * section.row_bytes
                if first % UNIT or section.row_bytes % UNIT:
                    raise ValueError(f"rows of {section.row_bytes} bytes can't be read in place by a GPU kernel")
                offsets[section.name][rows] = lies // UNIT
    return offsets


def _sent_on(plan: RankPlan, slots: dict[Key, dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Remote slots whose inputs this rank sends to others, by side."""
    base = plan.num_local * plan.head_groups
    none = np.zeros(0, np.int64)
    sent = {"q": [none], "kv": [none]}
    for (_, _, incoming, partial), sides in slots.items():
        if not incoming and not partial:
            for side, those in sides.items():
                sent[side].append(those[those >= base])
    return {side: np.unique(np.concatenate(parts)) for side, parts in sent.items()}
