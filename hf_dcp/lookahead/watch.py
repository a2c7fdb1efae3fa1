"""What the training process says of a plan store that fails: one line when plans stop coming, one when they come again."""

from __future__ import annotations

import logging

from hf_dcp.lookahead.batch_plan import BatchPlan

logger = logging.getLogger("hf_dcp")
ALL_WELL_AFTER = 8


class StoreWatch:
    """Looks at the plans of this rank as they are used."""

    def __init__(self) -> None:
        self.failing = False
        self._well = 0

    def see(self, plan: BatchPlan) -> None:
        """Warn once when plans come with trouble; say so once when several in a row came without."""
        if plan.trouble:
            if not self.failing:
                logger.warning(
                    "hf_dcp: rank %d gets no plans of other ranks and makes them itself until it does: %s",
                    plan.rank_plan.rank,
                    plan.trouble,
                )
            self.failing, self._well = True, 0
        elif self.failing:
            self._well += 1
            if self._well >= ALL_WELL_AFTER:
                self.failing = False
                logger.warning("hf_dcp: rank %d gets plans from the plan store again", plan.rank_plan.rank)
