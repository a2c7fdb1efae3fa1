"""Verification of rank plans against the batch, independent of how they were made.

What is checked, in this order, each with one sentence when it fails:

- the plans are those of all ranks of one group, and of this batch; every token has one owner;
- items, slices, messages and programs are well formed; slots stand for the tokens that items name;
- the items of all ranks compute every attended (query token, KV token, head group) exactly once, and no other;
- only rows that are needed travel: every remote row is used by an item of its rank;
- every message is known at both ends, with the same rows in the same order; no rank waits for ever;
- rows are there when they are sent, and when items use them;
- every owner gets every partial result exactly once, also through gateways;
- rows take the ways of the byte rules: once into a node, from the owner, and partial results the same way back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_dcp.planning.batch import BatchSpec
from hf_dcp.planning.check.coverage import Expected, Fingerprints, attend, require_coverage
from hf_dcp.planning.check.error import PlanError
from hf_dcp.planning.check.flow import Flow
from hf_dcp.planning.check.hops import require_hops, require_used
from hf_dcp.planning.check.rows import SIDES, owners, slots_of
from hf_dcp.planning.check.tables import require_agreement, require_items, require_matching, require_pass
from hf_dcp.planning.plan import PASSES, RankPlan

__all__ = ["PlanError", "check"]


def check(batch: BatchSpec, rank_plans: Sequence[RankPlan], *, minimal: bool = True) -> None:
    """Check the plans of all ranks.

    Args:
        minimal: also require that rows travel only where they are used, and by the ways of the byte rules. Static
            schedules as they are published don't.

    Raises:
        PlanError: for the first thing that is wrong.
    """
    require_agreement(batch, rank_plans)
    owner = owners(batch.num_tokens, rank_plans)
    prints = Fingerprints.of(batch.num_tokens)
    for index in range(len(rank_plans[0].windows)):
        _check_window(batch, rank_plans, index, owner, prints, minimal)


def _check_window(
    batch: BatchSpec,
    rank_plans: Sequence[RankPlan],
    index: int,
    owner: np.ndarray,
    prints: Fingerprints,
    minimal: bool,
) -> None:
    parts = [plan.windows[index] for plan in rank_plans]
    where = "" if parts[0].window is None else f"window {parts[0].window}, "
    sides, sums = [], []
    for plan, part in zip(rank_plans, parts):
        name = f"{where}rank {plan.rank}"
        tables = zip((part.q_remote, part.kv_remote), SIDES)
        q, kv = (slots_of(plan, table, owner, f"{name}, remote {side} rows") for table, side in tables)
        require_items(part, (q, kv), name)
        for which, one in part.passes():
            require_pass(one, len(part.items), (q, kv), plan.rank, len(rank_plans), f"{name}, {which}")
        sides.append((q, kv))
        sums.append([np.zeros(len(slots), np.uint64) for slots in (q, kv)])
        attend(part.items, part.slices, (q, kv), prints, sums[-1])
    expected = Expected.of(batch, parts[0].window, prints)
    require_coverage(batch, parts, sides, sums, expected, f"{where}all ranks")
    if minimal:
        require_used(sides, sums, f"{where}all ranks")
    for which in PASSES:
        passes = [getattr(part, which) for part in parts]
        require_matching(passes, where + which)
        flow = Flow(parts, passes, sides, prints, which == "backward", minimal, where + which)
        flow.run()
        flow.require_results(expected)
        if minimal:
            require_hops(flow, owner, np.array(rank_plans[0].node_of_rank, np.int32))
