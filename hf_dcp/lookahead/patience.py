"""How long to wait for a plan that another rank makes."""

from __future__ import annotations


class Patience:
    """How long a rank waits for another's plan: fifty times what planning takes, and less after plans didn't come.

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
        self._misses = 0

    def seconds(self) -> float:
        if self._plan_s is None:
            return self.most
        usual = max(self.LEAST_AT_FIRST, 50 * self._plan_s)
        least = max(self.LEAST_LATER, 3 * self._plan_s)
        return min(self.most, max(least, usual / 4**self._misses))

    def learn(self, plan_s: float) -> None:
        """Planning has lately taken up to so many seconds."""
        self._plan_s = max(plan_s, 0.9 * (self._plan_s or 0.0))

    def hit(self) -> None:
        self._misses = 0

    def miss(self) -> None:
        self._misses = min(self._misses + 1, 8)
