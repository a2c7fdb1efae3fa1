"""What a plan means: all ranks' plans executed in numpy, in one process, and the bytes they send.

Written to be read. Every rank has only the rows that its plan says it has; what travels is copied from the sender's
slots to the receiver's, and counted by the byte rules of `RowBytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_dcp.planning.batch import RowBytes
from hf_dcp.planning.check.error import PlanError
from hf_dcp.planning.lockstep import DeadlockError, walk_in_lockstep
from hf_dcp.planning.plan import Item, Message, Op, PassPlan, Plan, RankPlan, Slice, WindowPlan

__all__ = ["DeadlockError", "Result", "execute", "item_mask"]

INPUTS = {
    "forward": (("q",), ("k", "v")),
    "backward": (("q", "dout", "lse", "delta"), ("k", "v")),
    "backward_keep": (("dout", "lse", "delta"), ()),
}
"""What travels towards the tiles in each pass, of Q rows and of KV rows."""

PARTIALS = {
    "forward": (("out", "lse"), ()),
    "backward": (("dq",), ("dk", "dv")),
    "backward_keep": (("dq",), ("dk", "dv")),
}
"""What travels back to the owners."""


@dataclass(frozen=True)
class Result:
    """Attention of a whole batch, in batch-global token order."""

    out: np.ndarray
    """[tokens, heads, D]; 0 for a query token that attends to nothing."""
    lse: np.ndarray
    """[tokens, heads]; -inf for a query token that attends to nothing."""
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    sent: dict[str, np.ndarray]
    """Pass -> int64[world, world], bytes by (sender, receiver); passes "forward" and "backward" or "backward_keep"."""


def execute(
    plan: Plan | Sequence[RankPlan],
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dout: np.ndarray,
    *,
    scale: float | None = None,
    window: int | None = None,
    backward_kv: str = "refetch",
) -> Result:
    """Run forward and backward of one attention layer on all ranks.

    Args:
        plan: a plan, or the plans of all ranks.
        q, dout: float64[tokens, heads, D]; k, v: float64[tokens, kv_heads, D], batch-global.
        scale: factor of the scores; None for 1 / sqrt(D).
        window: sliding window of the layer.
        backward_kv: "refetch" or "keep".

    Raises:
        DeadlockError: if the programs of the ranks don't fit together.
        PlanError: if a rank uses or sends rows that it doesn't have.
    """
    rank_plans = plan.rank_plans if isinstance(plan, Plan) else plan
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    ranks = [_Rank(rank_plan, rank_plan.window(window), scale) for rank_plan in rank_plans]
    for rank in ranks:
        rank.load(q=q, dout=dout, k=k, v=v)
    backward = "backward" if backward_kv == "refetch" else "backward_keep"
    sent = {which: _run(ranks, which) for which in ("forward", backward)}
    names = ("out", "lse", "dq", "dk", "dv")
    return Result(**{name: _gather(rank_plans, [rank.rows[name] for rank in ranks]) for name in names}, sent=sent)


def _run(ranks: list[_Rank], which: str) -> np.ndarray:
    """One pass on all ranks: bytes sent, int64[world, world]."""
    mailbox: dict[tuple[int, int, int, int], list[np.ndarray]] = {}
    sent = np.zeros((len(ranks), len(ranks)), np.int64)
    passes = [rank.begin(which, mailbox, sent) for rank in ranks]
    walk_in_lockstep(passes, lambda rank, op, argument: ranks[rank].step(op, argument))
    if mailbox:
        raise DeadlockError(f"messages (sender, receiver, exchange, partial) {sorted(mailbox)} are never received")
    return sent


def _gather(rank_plans: Sequence[RankPlan], rows: list[np.ndarray]) -> np.ndarray:
    """The own rows of all ranks, [slots, heads of a group, ...] each, as [tokens, heads, ...] in batch order."""
    result = np.full((rank_plans[0].num_tokens, rank_plans[0].head_groups, *rows[0].shape[1:]), np.nan)
    for plan, part in zip(rank_plans, rows, strict=True):
        own = part[: plan.num_local * plan.head_groups]
        result[plan.local_tokens()] = own.reshape(plan.num_local, plan.head_groups, *part.shape[1:])
    return result.reshape(len(result), -1, *result.shape[3:])


class _Rank:
    """The rows of one rank, by slot, and how it executes each instruction."""

    def __init__(self, plan: RankPlan, part: WindowPlan, scale: float) -> None:
        self.plan, self.part, self.scale = plan, part, scale
        self.own = plan.num_local * plan.head_groups
        self.num_slots = [self.own + int(remote[:, 1].sum()) for remote in (part.q_remote, part.kv_remote)]
        self.row_bytes = RowBytes.of(plan.shape, plan.head_groups, plan.reduce_dtype)

    def load(self, **tensors: np.ndarray) -> None:
        """Take this rank's rows of q, dout, k, v, each [tokens, heads, D], and make room for the others."""
        groups, tokens = self.plan.head_groups, self.plan.local_tokens()
        self.rows = {}
        for name, tensor in tensors.items():
            space = self._space(name, np.nan, tensor.shape[1] // groups, tensor.shape[2])
            space[: self.own] = tensor[tokens].reshape(self.own, *space.shape[1:])
            self.rows[name] = space

    def _space(self, name: str, value: float, *shape: int) -> np.ndarray:
        """[slots, *shape] for the rows of this name."""
        return np.full((self.num_slots[name in ("k", "v", "dk", "dv")], *shape), value)

    def begin(self, which: str, mailbox: dict, sent: np.ndarray) -> PassPlan:
        """Prepare accumulators for a pass. Of remote rows nothing is there, save what backward keeps of forward."""
        self.which, self.mailbox, self.sent = which, mailbox, sent
        self.one = self.part.forward if which == "forward" else self.part.backward
        self.received: dict[int, list[tuple[np.ndarray, list[np.ndarray]]]] = {}
        self.held = [np.arange(slots) < self.own for slots in self.num_slots]
        if which == "backward_keep":
            self.held[1][:] = True
        rows, like_q, like_kv = self.rows, self.rows["q"].shape[1:], self.rows["k"].shape[1:]
        if which == "forward":
            rows["out"] = self._space("out", 0.0, *like_q)
            rows["lse"] = self._space("lse", -np.inf, like_q[0])
            return self.one
        rows["delta"] = self._space("delta", np.nan, like_q[0])
        rows["delta"][: self.own] = (rows["dout"] * rows["out"])[: self.own].sum(-1)
        rows["lse"][self.own :] = np.nan  # what forward left there was partial: the final one arrives with dout
        for name, shape in (("dq", like_q), ("dk", like_kv), ("dv", like_kv)):
            rows[name] = self._space(name, 0.0, *shape)
        return self.one

    def step(self, op: Op, argument: int) -> None:
        if op == Op.START:
            self._start(argument)
        elif op == Op.ATTEND:
            begin, end = self.one.divisions[argument : argument + 2]
            for item in self.part.items[self.one.order[begin:end]].astype(np.int64):
                self._attend(item)
        elif op == Op.WAIT:
            self._wait(argument)
        elif op == Op.REDUCE:
            self._reduce(argument)
        # FINISH: nothing is left to do, the accumulators of own rows are normalised at all times

    def _messages(self, exchange: int, incoming: int) -> np.ndarray:
        table = self.one.messages
        return table[(table[:, Message.EXCHANGE] == exchange) & (table[:, Message.INCOMING] == incoming)]

    def _slots(self, message: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Slots of the Q rows and of the KV rows of a message, in its order."""
        q = self.one.q_runs[message[Message.Q_BEGIN] : message[Message.Q_END]]
        kv = self.one.kv_runs[message[Message.KV_BEGIN] : message[Message.KV_END]]
        return self.plan.slots(q), self.plan.slots(kv)

    def _require_held(self, slots: Sequence[np.ndarray], what: str) -> None:
        for held, of_side in zip(self.held, slots, strict=True):
            if not held[of_side].all():
                raise PlanError(f"rank {self.plan.rank} {what} rows that it doesn't have")

    def _start(self, exchange: int) -> None:
        for message in self._messages(exchange, incoming=0):
            peer, partial = int(message[Message.PEER]), int(message[Message.PARTIAL])
            slots, names = self._slots(message), (PARTIALS if partial else INPUTS)[self.which]
            if not partial:
                self._require_held(slots, "sends")
            rows = [self.rows[name][slots[side]] for side in (0, 1) for name in names[side]]
            self.mailbox[self.plan.rank, peer, exchange, partial] = rows
            q_bytes, kv_bytes = (self.row_bytes.partials if partial else self.row_bytes.inputs)(self.which)
            self.sent[self.plan.rank, peer] += len(slots[0]) * q_bytes + len(slots[1]) * kv_bytes

    def _wait(self, exchange: int) -> None:
        for message in self._messages(exchange, incoming=1):
            peer, partial = int(message[Message.PEER]), int(message[Message.PARTIAL])
            rows = self.mailbox.pop((peer, self.plan.rank, exchange, partial), None)
            if rows is None:
                raise DeadlockError(f"rank {self.plan.rank} waits for a message that rank {peer} never sends")
            if partial:
                self.received.setdefault(exchange, []).append((message, rows))
                continue
            for side, slots in enumerate(self._slots(message)):
                for name in INPUTS[self.which][side]:
                    self.rows[name][slots] = rows.pop(0)
                self.held[side][slots] = True

    def _reduce(self, exchange: int) -> None:
        for message, rows in self.received.pop(exchange):
            q_slots, kv_slots = self._slots(message)
            if self.which == "forward":
                self._merge(q_slots, *rows)
            else:
                for name, slots, part in zip(("dq", "dk", "dv"), (q_slots, kv_slots, kv_slots), rows, strict=True):
                    self.rows[name][slots] += part

    def _merge(self, slots: np.ndarray, out: np.ndarray, lse: np.ndarray) -> None:
        """Merge partial outputs, each normalised by itself: their weights are exp(lse - total), 0 for empty ones."""
        own_out, own_lse = self.rows["out"][slots], self.rows["lse"][slots]
        total = np.logaddexp(own_lse, lse)
        base = np.where(np.isinf(total), 0.0, total)
        self.rows["out"][slots] = np.exp(own_lse - base)[..., None] * own_out + np.exp(lse - base)[..., None] * out
        self.rows["lse"][slots] = total

    def _run_of_slots(self, slot: int, count: int) -> np.ndarray:
        return slot + np.arange(count) * (self.plan.head_groups if slot < self.own else 1)

    def _attend(self, item: np.ndarray) -> None:
        q_slots = self._run_of_slots(item[Item.Q_SLOT], item[Item.Q_COUNT])
        kv_slots = self._run_of_slots(item[Item.KV_SLOT], item[Item.KV_COUNT])
        self._require_held((q_slots, kv_slots), "attends with")
        q, k, v = self.rows["q"][q_slots], self.rows["k"][kv_slots], self.rows["v"][kv_slots]  # [rows, heads, D]
        kv_heads, share = k.shape[1], q.shape[1] // k.shape[1]
        keys, values = np.repeat(k, share, axis=1), np.repeat(v, share, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, keys) * self.scale
        scores = np.where(item_mask(item, self.part.slices), scores, -np.inf)
        if self.which == "forward":
            lse = np.logaddexp.reduce(scores, axis=2)
            self._merge(q_slots, np.einsum("hqk,khd->qhd", _weights(scores, lse), values), lse.T)
            return
        dout, delta = self.rows["dout"][q_slots], self.rows["delta"][q_slots]
        p = _weights(scores, self.rows["lse"][q_slots].T)
        ds = p * (np.einsum("qhd,khd->hqk", dout, values) - delta.T[..., None]) * self.scale
        self.rows["dq"][q_slots] += np.einsum("hqk,khd->qhd", ds, keys)
        by_kv_head = (len(k), kv_heads, share, k.shape[2])
        self.rows["dk"][kv_slots] += np.einsum("hqk,qhd->khd", ds, q).reshape(by_kv_head).sum(2)
        self.rows["dv"][kv_slots] += np.einsum("hqk,qhd->khd", p, dout).reshape(by_kv_head).sum(2)


def _weights(scores: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """softmax(scores) [heads, rows, columns], given its lse [heads, rows]; 0 in rows that attend to nothing."""
    return np.exp(scores - np.where(np.isinf(lse), 0.0, lse)[..., None])


def item_mask(item: np.ndarray, slices: np.ndarray) -> np.ndarray:
    """The attended elements of an item: bool[Q rows, KV rows]."""
    first, last = item[Item.SLICE_BEGIN], item[Item.SLICE_END]
    if first == last:
        return np.ones((item[Item.Q_COUNT], item[Item.KV_COUNT]), bool)
    q = item[Item.Q_TOKEN] + np.arange(item[Item.Q_COUNT])[:, None]
    kv = item[Item.KV_TOKEN] + np.arange(item[Item.KV_COUNT])[None]
    mask = np.zeros((len(q), kv.shape[1]), bool)
    for s in slices[first:last].astype(np.int64):
        row = q - s[Slice.Q_BEGIN]
        lo, hi = s[Slice.LO] + row * s[Slice.LO_SLOPE], s[Slice.HI] + row * s[Slice.HI_SLOPE]
        mask |= (row >= 0) & (q < s[Slice.Q_END]) & (kv >= lo) & (kv < hi)
    return mask
