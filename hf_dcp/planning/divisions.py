"""Divisions: in which phase a device computes each of its tiles.

Time is cut into **phases**. In phase p a device exchanges rows (exchange p) while it computes its division of phase p.
Rows that come straight from their owner can be there in phase 1, rows relayed by a gateway in phase 2; partial results
leave in the phase after they are made. So tiles on local rows go first, to hide the first fetch, and last, to hide the
last return; a device computes in at most T phases, of about equal compute (paper section 4.3, with the last division no
longer taking whatever remains).
"""

from __future__ import annotations

import numba as nb
import numpy as np

LARGEST_SHARE = 0.36
"""A phase is skipped if keeping it would leave more than this share of a device's compute in a later one."""


def assign_phases(
    device: np.ndarray,
    compute: np.ndarray,
    earliest: np.ndarray,
    returns: np.ndarray,
    rows: np.ndarray,
    divisions: int,
    world_size: int,
) -> np.ndarray:
    """The phase of every unit (a tile of one head group).

    Args:
        device: int32[units].
        compute: int64[units], any unit of work.
        earliest: int8[units]: 0 if all its rows are local, 1 if they come from their owners, 2 if one is relayed.
        returns: bool[units]: whether a partial result of it travels.
        rows: int64[units]: units with equal numbers read the same remote rows, and are computed together.
        divisions: at most this many different phases per device.

    Returns:
        int32[units]
    """
    # remote units with returns come first, so that their results leave early; those that share rows follow each other,
    # so that rows are fetched little by little
    order = np.lexsort((rows, ~returns, earliest, device))
    starts = np.searchsorted(device[order], np.arange(world_size + 1))
    phase = np.zeros(len(device), np.int32)
    _assign(order, starts, compute, earliest, returns, divisions, phase)
    return phase


@nb.njit(cache=True)
def _assign(order, starts, compute, earliest, returns, divisions, phase):
    for d in range(len(starts) - 1):
        units = order[starts[d] : starts[d + 1]]
        if len(units):
            _assign_device(units, compute, earliest, returns, divisions, phase)


@nb.njit(cache=True)
def _phases_of(total, local, direct, divisions, latest):
    """The phases in which a device computes: at most ``divisions``, the last one at or after ``latest``."""
    chosen = np.empty(divisions, np.int64)
    count = 0
    if local > 0 and (divisions > 1 or latest == 0):
        chosen[0] = 0
        count = 1
    if latest == 2 and direct > 0 and count + 1 < divisions:
        left = divisions - count - 1
        if (total - local - direct) <= LARGEST_SHARE * total * left:
            chosen[count] = 1
            count += 1
    following = max(latest, 1) if count and chosen[0] == 0 else latest
    while count < divisions:
        chosen[count] = following
        following += 1
        count += 1
    return chosen


@nb.njit(cache=True)
def _assign_device(units, compute, earliest, returns, divisions, phase):
    total, local, direct, latest, any_return = 0, 0, 0, 0, False
    for u in units:
        total += compute[u]
        local += compute[u] if earliest[u] == 0 else 0
        direct += compute[u] if earliest[u] == 1 else 0
        latest = max(latest, earliest[u])
        any_return = any_return or returns[u]
    phases = _phases_of(total, local, direct, divisions, latest)
    fair = total / divisions
    # local work is shared between the first phase (behind the first fetch) and the last (behind the last return)
    front = min(fair, local / 2 if any_return and local < 2 * fair else local)
    back = min(fair, local - front) if any_return else 0.0
    done = np.zeros(len(units), nb.boolean)
    left = float(total)
    for chunk in range(divisions):
        last = chunk == divisions - 1
        target = left / (divisions - chunk)
        if not last and phases[chunk] == 0 and latest > 0:
            target = min(target, front)
        room = target
        for remote in (True, False):  # remote work first: it is what local work is kept back for
            for i in range(len(units)):
                u = units[i]
                if done[i] or (earliest[u] > 0) != remote or earliest[u] > phases[chunk]:
                    continue
                if not last and (room < compute[u] / 2 or (not remote and local - compute[u] < back)):
                    continue
                done[i] = True
                phase[u] = phases[chunk]
                room -= compute[u]
                left -= compute[u]
                local -= compute[u] if not remote else 0
