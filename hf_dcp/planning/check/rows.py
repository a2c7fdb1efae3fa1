"""Which rows the slots of a rank stand for, and whether tables of runs of slots make sense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_dcp.planning.check.error import PlanError, require
from hf_dcp.planning.plan import RankPlan, expand_runs

SIDES = ("Q", "KV")


@dataclass(frozen=True)
class Slots:
    """The rows of one side that a rank has, by slot."""

    token: np.ndarray
    """int32[slots]: batch-global token."""
    group: np.ndarray
    """int32[slots]: head group."""
    own: int
    """The first ``own`` slots are the rank's own rows."""
    groups: int

    def __len__(self) -> int:
        return len(self.token)

    def step(self, slot: np.ndarray) -> np.ndarray:
        """Distance of the slots of a run that begins here."""
        return np.where(slot < self.own, self.groups, 1)

    def expand(self, runs: np.ndarray) -> np.ndarray:
        """All slots of runs (slot, count), in order."""
        return expand_runs(runs[:, 0], runs[:, 1], self.step(runs[:, 0]))

    def require_runs(self, first: np.ndarray, count: np.ndarray, where: str) -> None:
        """Require every run to be rows of one group at consecutive tokens, either own or remote."""
        last = first + (count - 1) * self.step(first)
        inside = (count > 0) & (first >= 0) & (last < np.where(first < self.own, self.own, len(self)))
        require(inside.all(), f"{where}: a run of slots goes beyond the slots of its rank")
        straight = self.group[first] == self.group[last]
        straight &= self.token[last] - self.token[first] == count - 1
        require(straight.all(), f"{where}: a run of slots isn't one of consecutive tokens of one head group")

    def describe(self, slot: int, side: int) -> str:
        return f"the {SIDES[side]} row of token {self.token[slot]}, head group {self.group[slot]}"


def owners(num_tokens: int, rank_plans: Sequence[RankPlan]) -> np.ndarray:
    """The rank that owns each token: int32[tokens]. Raises PlanError unless each has exactly one."""
    count = np.zeros(num_tokens, np.int32)
    owner = np.full(num_tokens, -1, np.int32)
    for plan in rank_plans:
        runs = _table(plan.token_runs, 2, f"rank {plan.rank}: token_runs")
        first, size = runs.T.astype(np.int64)
        ascending = (size > 0).all() and (first[1:] >= (first + size)[:-1]).all()
        require(ascending, f"rank {plan.rank}: token_runs must ascend, without empty runs")
        inside = not len(runs) or (first[0] >= 0 and (first + size)[-1] <= num_tokens)
        require(inside, f"rank {plan.rank}: token_runs go beyond the {num_tokens} tokens of the batch")
        tokens = plan.local_tokens()
        count[tokens] += 1
        owner[tokens] = plan.rank
    wrong = np.flatnonzero(count != 1)
    if len(wrong):
        raise PlanError(f"token {wrong[0]} has {count[wrong[0]]} owners in place of one")
    return owner


def slots_of(plan: RankPlan, remote: np.ndarray, owner: np.ndarray, where: str) -> Slots:
    """The slots of one side of a rank: its own rows, then the remote ones. Raises PlanError for a wrong table."""
    groups = plan.head_groups
    token, count, group = _table(remote, 3, where).T.astype(np.int64)
    require(((group >= 0) & (group < groups)).all(), f"{where}: there are only {groups} head groups")
    require((count > 0).all() and (token >= 0).all() and (token + count <= len(owner)).all(), f"{where}: no such token")
    after = (group[1:] > group[:-1]) | ((group[1:] == group[:-1]) & (token[1:] >= (token + count)[:-1]))
    require(after.all(), f"{where}: remote rows must be sorted by head group and token, each once")
    tokens = expand_runs(token, count)
    require((owner[tokens] != plan.rank).all(), f"{where}: a rank's own rows must not be remote ones")
    local = plan.local_tokens()
    return Slots(
        token=np.concatenate([np.repeat(local, groups), tokens]).astype(np.int32),
        group=np.concatenate([np.tile(np.arange(groups), len(local)), np.repeat(group, count)]).astype(np.int32),
        own=len(local) * groups,
        groups=groups,
    )


def _table(array: np.ndarray, columns: int, where: str) -> np.ndarray:
    fits = array.dtype == np.int32 and array.ndim == 2 and array.shape[1] == columns
    require(fits, f"{where} must be int32[..., {columns}], not {array.dtype}{list(array.shape)}")
    return array
