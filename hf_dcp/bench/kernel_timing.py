"""Seconds of a function on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

ROUNDS = 5
WARMUP = 2
ENOUGH = 2.0
"""No further round starts after so many seconds."""


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(function: Callable[[], Any], device: str) -> float:
    """Median seconds of a call, by events on a GPU."""
    for _ in range(WARMUP):
        function()
    synchronise(device)
    found: list[float] = []
    since = time.perf_counter()
    while len(found) < ROUNDS and (not found or time.perf_counter() - since < ENOUGH):
        found.append(_events(function) if device == "cuda" else _clock(function))
    return median(found)


def _events(function: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _clock(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin
