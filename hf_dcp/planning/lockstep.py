"""Walking the programs of all ranks in one process, in the order in which real ranks could."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hf_dcp.planning.plan import Message, Op, PassPlan


class DeadlockError(RuntimeError):
    """No rank can go on: somebody waits for a message that nobody sends."""


def walk_in_lockstep(passes: Sequence[PassPlan], execute: Callable[[int, Op, int], None]) -> None:
    """Execute every instruction of every rank: ``execute(rank, op, argument)``, each rank's own in order.

    A rank waits in WAIT of an exchange until all that it shares a message with in that exchange have started it. That
    is the strictest transport, one that buffers nothing; what gets through here gets through any other.

    Raises:
        DeadlockError: if no rank can go on.
    """
    peers = [_peers(one) for one in passes]
    position = [0] * len(passes)
    started: list[set[int]] = [set() for _ in passes]
    moved = True
    while moved:
        moved = False
        for rank, one in enumerate(passes):
            while position[rank] < len(one.program):
                op, argument = Op(one.program[position[rank], 0]), int(one.program[position[rank], 1])
                if op == Op.WAIT and any(argument not in started[peer] for peer in peers[rank].get(argument, ())):
                    break
                execute(rank, op, argument)
                if op == Op.START:
                    started[rank].add(argument)
                position[rank] += 1
                moved = True
    stuck = [rank for rank, one in enumerate(passes) if position[rank] < len(one.program)]
    if stuck:
        exchange = int(passes[stuck[0]].program[position[stuck[0]], 1])
        waits_for = sorted(peer for peer in peers[stuck[0]][exchange] if exchange not in started[peer])
        raise DeadlockError(
            f"ranks {stuck} can't go on: rank {stuck[0]} waits in exchange {exchange} for ranks {waits_for}, which "
            "don't start it"
        )


def _peers(one: PassPlan) -> dict[int, list[int]]:
    """The ranks that this rank shares a message with, by exchange."""
    pairs = np.unique(one.messages[:, [Message.EXCHANGE, Message.PEER]], axis=0)
    result: dict[int, list[int]] = {}
    for exchange, peer in pairs.tolist():
        result.setdefault(exchange, []).append(peer)
    return result
