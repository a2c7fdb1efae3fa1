"""A connection to the plan store that may break: it is left alone for a while, and then tried again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from hf_dcp.lookahead.store import PlanStore, StoreAddress, StoreError, StoreTimeout

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 15.0
PATIENCE_AT_FIRST = 30.0
PATIENCE_LATER = 3.0

T = TypeVar("T")


class StoreLink:
    """Opens the store when it is first used, and again after failures, with pauses that grow from 0.5 to 15 s.

    Args:
        address: of the store.
    """

    def __init__(self, address: StoreAddress) -> None:
        self.address = address
        self.trouble = ""
        """Why the store can't be used; empty as long as it can."""
        self._store: PlanStore | None = None
        self._pause = 0.0
        self._again_at = 0.0

    def use(self, action: Callable[[PlanStore], T]) -> T:
        """What ``action`` returns for the store.

        Raises:
            StoreTimeout: the store works, but the value didn't come.
            StoreError: the store failed, now or so lately that it wasn't tried again.
        """
        if self.trouble and time.monotonic() < self._again_at:
            raise StoreError(self.trouble)
        try:
            result = action(self._opened())
        except StoreTimeout:
            self._works()
            raise
        except StoreError as error:
            self._fails(str(error))
            raise
        self._works()
        return result

    def _opened(self) -> PlanStore:
        if self._store is None:
            try:
                self._store = self.address.open(PATIENCE_LATER if self.trouble else PATIENCE_AT_FIRST)
            except StoreTimeout as error:
                raise StoreError(f"the plan store doesn't answer: {error}") from error
        return self._store

    def _works(self) -> None:
        self.trouble, self._pause = "", 0.0

    def _fails(self, why: str) -> None:
        self.trouble, self._store = why, None
        self._pause = min(max(2 * self._pause, FIRST_PAUSE), LONGEST_PAUSE)
        self._again_at = time.monotonic() + self._pause
