"""What a wrong plan raises."""

from __future__ import annotations


class PlanError(ValueError):
    """A plan that doesn't compute the attention of its batch, or not by the rules."""


def require(condition: object, message: str) -> None:
    if not condition:
        raise PlanError(message)
