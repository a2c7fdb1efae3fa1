"""What a plan means: all ranks' plans executed in numpy, in one process, and the bytes they send.

Written to be read. Every rank has only the rows that its plan says it has; what travels is copied from the sender's slots
to the receiver's, and counted by the byte rules of `RowBytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_dcp.planning.batch import RowBytes
from hf_dcp.planning.plan import Item, Message, Op, PassPlan, RankPlan, Slice, WindowPlan


@dataclass(frozen=True)
class Result:
    """Attention of a whole batch, in batch-global token order."""

    out: np.ndarray
    """[tokens, heads, D]"""
    lse: np.ndarray
    """[tokens, heads]; -inf for a query token that attends to nothing."""
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    sent: dict[str, np.ndarray]
    """Pass -> int64[world, world], bytes by (sender, receiver); passes "forward" and "backward" or "backward_keep"."""


class DeadlockError(RuntimeError):
    """No rank can go on: somebody waits for a message that nobody sends."""


def execute(
    rank_plans: Sequence[RankPlan],
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
        q, dout: float64[tokens, heads, D]; k, v: float64[tokens, kv_heads, D], batch-global.
        scale: factor of the scores; None for 1 / sqrt(D).
        window: sliding window of the layer.
        backward_kv: "refetch" or "keep".

    Raises:
        DeadlockError: if the programs of the ranks don't fit together.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    ranks = [_Rank(plan, plan.window(window), scale) for plan in rank_plans]
    for rank in ranks:
        rank.load(q, np.stack([k, v], 1), dout)
    sent = {"forward": _run(ranks, "forward")}
    if backward_kv == "refetch":
        for rank in ranks:
            rank.forget_remote()
    backward = "backward" if backward_kv == "refetch" else "backward_keep"
    sent[backward] = _run(ranks, backward)
    columns = [_gather(rank_plans, [getattr(rank, name) for rank in ranks]) for name in ("out", "lse", "dq", "dkv")]
    out, lse, dq, dkv = columns
    return Result(out, lse, dq, dkv[:, 0], dkv[:, 1], sent)


def _run(ranks: list[_Rank], which: str) -> np.ndarray:
    """All ranks' programs of one pass, each as far as it can go, until all are done."""
    mailbox: dict[tuple[int, int, int, int], list[np.ndarray]] = {}
    sent = np.zeros((len(ranks), len(ranks)), np.int64)
    position = [0] * len(ranks)
    programs = [rank.begin(which).program for rank in ranks]
    while any(p < len(program) for p, program in zip(position, programs, strict=True)):
        moved = False
        for r, rank in enumerate(ranks):
            while position[r] < len(programs[r]) and rank.step(*programs[r][position[r]], mailbox, sent):
                position[r] += 1
                moved = True
        if not moved:
            stuck = [r for r in range(len(ranks)) if position[r] < len(programs[r])]
            raise DeadlockError(f"ranks {stuck} wait in {which} for messages that nobody sends")
    if mailbox:
        raise DeadlockError(f"messages (sender, receiver, exchange, partial) {sorted(mailbox)} are never received")
    return sent


def _gather(plans: Sequence[RankPlan], local: list[np.ndarray]) -> np.ndarray:
    """Rows of all ranks, [slots, heads of a group, ...] each, as [tokens, (2,) heads, ...] in batch order."""
    groups = plans[0].head_groups
    parts = []
    for plan, rows in zip(plans, local, strict=True):
        own = rows[: plan.num_local * groups].reshape(plan.num_local, groups, *rows.shape[1:])
        if rows.ndim == 4:  # KV rows: [tokens, groups, 2, heads of a group, D]
            own = own.swapaxes(1, 2)
        axis = 2 if rows.ndim == 4 else 1
        heads = groups * own.shape[axis + 1]
        parts.append(own.reshape(*own.shape[:axis], heads, *own.shape[axis + 2 :]))
    joined = np.concatenate(parts)
    result = np.empty_like(joined)
    result[np.concatenate([plan.local_tokens() for plan in plans])] = joined
    return result


class _Rank:
    """The rows of one rank, by slot, and how it executes each instruction."""

    def __init__(self, plan: RankPlan, part: WindowPlan, scale: float) -> None:
        self.plan, self.part, self.scale = plan, part, scale
        self.own = plan.num_local * plan.head_groups
        self.q_slots = self.own + int(part.q_remote[:, 1].sum())
        self.kv_slots = self.own + int(part.kv_remote[:, 1].sum())
        self.row_bytes = RowBytes.of(plan.shape, plan.head_groups, plan.reduce_dtype)

    def load(self, q: np.ndarray, kv: np.ndarray, dout: np.ndarray) -> None:
        """Take this rank's own rows; remote slots hold NaN until something arrives."""
        tokens, groups = self.plan.local_tokens(), self.plan.head_groups
        heads, dim = q.shape[1] // groups, q.shape[2]

        def rows(x: np.ndarray, slots: int) -> np.ndarray:  # x: [tokens, (2,) heads, D]
            split = x[tokens].reshape(len(tokens), *x.shape[1:-2], groups, x.shape[-2] // groups, dim)
            held = np.full((slots, *x.shape[1:-2], x.shape[-2] // groups, dim), np.nan)
            held[: self.own] = np.moveaxis(split, -3, 1).reshape(self.own, *held.shape[1:])
            return held

        self.q, self.kv = rows(q, self.q_slots), rows(kv, self.kv_slots)
        self.dout = rows(dout, self.q_slots)
        self.out = np.zeros((self.q_slots, heads, dim))
        self.lse = np.full((self.q_slots, heads), -np.inf)
        self.delta = np.full((self.q_slots, heads), np.nan)
        self.dq, self.dkv = np.zeros_like(self.q), np.zeros_like(self.kv)

    def forget_remote(self) -> None:
        """Drop the rows received in forward: backward fetches them again."""
        self.q[self.own :], self.kv[self.own :] = np.nan, np.nan

    def begin(self, which: str) -> PassPlan:
        self.which = which
        self.program = self.part.forward if which == "forward" else self.part.backward
        self.received: dict[int, list[tuple[np.ndarray, list[np.ndarray]]]] = {}
        if which != "forward":
            # the final lse and delta of its own rows; for remote ones they arrive
            self.delta[: self.own] = (self.dout * self.out)[: self.own].sum(-1)
            self.lse[self.own :] = np.nan
        return self.program

    def step(self, op: int, argument: int, mailbox: dict, sent: np.ndarray) -> bool:
        """Execute one instruction; False if it has to wait for a message."""
        if op == Op.START:
            self._start(argument, mailbox, sent)
        elif op == Op.ATTEND:
            for item in self.part.items[self._division(argument)].astype(np.int64):
                self._attend(item)
        elif op == Op.WAIT:
            return self._wait(argument, mailbox)
        elif op == Op.REDUCE:
            self._reduce(argument)
        return True

    def _division(self, d: int) -> np.ndarray:
        return self.program.order[self.program.divisions[d] : self.program.divisions[d + 1]]

    def _messages(self, exchange: int, incoming: int) -> np.ndarray:
        table = self.program.messages
        return table[(table[:, Message.EXCHANGE] == exchange) & (table[:, Message.INCOMING] == incoming)]

    def _slots(self, message: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        q = self.program.q_runs[message[Message.Q_BEGIN] : message[Message.Q_END]]
        kv = self.program.kv_runs[message[Message.KV_BEGIN] : message[Message.KV_END]]
        return self.plan.slots(q), self.plan.slots(kv)

    def _columns(self, partial: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The arrays that travel, of Q rows and of KV rows."""
        if partial:
            return ([self.out, self.lse], []) if self.which == "forward" else ([self.dq], [self.dkv])
        if self.which == "forward":
            return [self.q], [self.kv]
        again = self.which == "backward"
        return [self.q] * again + [self.dout, self.lse, self.delta], [self.kv] * again

    def _start(self, exchange: int, mailbox: dict, sent: np.ndarray) -> None:
        for message in self._messages(exchange, incoming=0):
            peer, partial = int(message[Message.PEER]), int(message[Message.PARTIAL])
            q_slots, kv_slots = self._slots(message)
            q_columns, kv_columns = self._columns(partial)
            rows = [c[q_slots] for c in q_columns] + [c[kv_slots] for c in kv_columns]
            if any(np.isnan(r).any() for r in rows):
                raise DeadlockError(f"rank {self.plan.rank} sends rows that it doesn't have to rank {peer}")
            mailbox[self.plan.rank, peer, exchange, partial] = rows
            per_row = self.row_bytes.partials(self.which) if partial else self.row_bytes.inputs(self.which)
            sent[self.plan.rank, peer] += len(q_slots) * per_row[0] + len(kv_slots) * per_row[1]

    def _wait(self, exchange: int, mailbox: dict) -> bool:
        incoming = self._messages(exchange, incoming=1)
        keys = [(int(m[Message.PEER]), self.plan.rank, exchange, int(m[Message.PARTIAL])) for m in incoming]
        if any(key not in mailbox for key in keys):
            return False
        for message, key in zip(incoming, keys, strict=True):
            rows = mailbox.pop(key)
            if message[Message.PARTIAL]:
                self.received.setdefault(exchange, []).append((message, rows))
                continue
            q_slots, kv_slots = self._slots(message)
            q_columns, kv_columns = self._columns(0)
            for slots, columns in ((q_slots, q_columns), (kv_slots, kv_columns)):
                for column in columns:
                    column[slots] = rows.pop(0)
        return True

    def _reduce(self, exchange: int) -> None:
        for message, rows in self.received.pop(exchange):
            q_slots, kv_slots = self._slots(message)
            if self.which == "forward":
                self._merge(q_slots, *rows)
            else:
                self.dq[q_slots] += rows[0]
                self.dkv[kv_slots] += rows[1]

    def _merge(self, slots: np.ndarray, out: np.ndarray, lse: np.ndarray) -> None:
        """Merge partial attention outputs by their log-sum-exp (Dao et al., FlashAttention, section 3)."""
        total = np.logaddexp(self.lse[slots], lse)
        with np.errstate(invalid="ignore"):
            mine, other = np.exp(self.lse[slots] - total), np.exp(lse - total)
        mine, other = np.nan_to_num(mine), np.nan_to_num(other)  # -inf - -inf: neither attends to anything
        self.out[slots] = mine[..., None] * self.out[slots] + other[..., None] * out
        self.lse[slots] = total

    def _attend(self, item: np.ndarray) -> None:
        q_slots = self.plan.slots(item[None, [Item.Q_SLOT, Item.Q_COUNT]])
        kv_slots = self.plan.slots(item[None, [Item.KV_SLOT, Item.KV_COUNT]])
        mask = item_mask(item, self.part.slices)
        q = self.q[q_slots]  # [rows, heads, D]
        k, v = np.repeat(self.kv[kv_slots], q.shape[1] // self.kv.shape[2], axis=2).swapaxes(0, 1)
        scores = np.where(mask, np.einsum("qhd,khd->hqk", q, k) * self.scale, -np.inf)
        if self.which == "forward":
            lse = np.logaddexp.reduce(scores, axis=2)
            p = np.exp(scores - np.where(np.isinf(lse), 0.0, lse)[..., None])
            self._merge(q_slots, np.einsum("hqk,khd->qhd", p, v), lse.T)
            return
        lse, dout = self.lse[q_slots].T, self.dout[q_slots]
        p = np.exp(scores - np.where(np.isinf(lse), 0.0, lse)[..., None])
        dp = np.einsum("qhd,khd->hqk", dout, v) - self.delta[q_slots].T[..., None]
        ds = p * dp * self.scale
        self.dq[q_slots] += np.einsum("hqk,khd->qhd", ds, k)
        grouped = (len(kv_slots), self.kv.shape[2], -1, q.shape[2])
        self.dkv[kv_slots, 0] += np.einsum("hqk,qhd->khd", ds, q).reshape(grouped).sum(2)
        self.dkv[kv_slots, 1] += np.einsum("hqk,qhd->khd", p, dout).reshape(grouped).sum(2)


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
