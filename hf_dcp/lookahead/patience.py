"""How long to wait for a plan that another rank makes."""

from __future__ import annotations


class Patience:
    """How long a rank waits for another's plan: fifty times what planning takes, or four times what waiting for plans that
    came has lately taken (on a machine that has other things to do); and less after plans didn't come.

    A plan that was lost never comes, so waiting is bounded by what planning takes. If several in a row are lost (the
    store was emptied, or refuses to store), waiting for each would stop training.

    Args:
        most: seconds; also the wait as long as nothing is known of planning.
    """

    LEAST_AT_FIRST = 10.0
    LEAST_LATER = 0.5

    def __init__(self, most: float) -> None:
        self.most = most
        self._plan_s: float | None = None
        self._wait_s = 0.0
        self._misses = 0

    def seconds(self) -> float:
        if self._plan_s is None:
            return self.most
        usual = max(self.LEAST_AT_FIRST, 50 * self._plan_s, 4 * self._wait_s)
        least = max(self.LEAST_LATER, 3 * self._plan_s)
        return min(self.most, max(least, usual / 4**self._misses))

    def learn(self, plan_s: float) -> None:
        """Planning has lately taken up to so many seconds."""
        self._plan_s = max(plan_s, 0.9 * (self._plan_s or 0.0))

    def hit(self, waited: float = 0.0) -> None:
        """A plan came after so many seconds."""
        self._wait_s = max(waited, 0.9 * self._wait_s)
        self._misses = 0

    def miss(self) -> None:
        self._misses = min(self._misses + 1, 8)
