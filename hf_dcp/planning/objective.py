"""Bytes and balance of a placement (being written)."""

from __future__ import annotations

from typing import Any

Score = Any


def evaluate(problem: Any, placement: Any) -> Score:
    return None
