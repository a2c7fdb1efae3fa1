"""Walking the programs of all ranks in one process, in the order in which real ranks could."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hf_dcp.planning.plan import Message, Op, PassPlan


class DeadlockError(RuntimeError):
    """No rank can go on: somebody waits for a message that nobody sends."""


def walk_in_lockstep(passes: Sequence[PassPlan], execute: Callable[[int, Op, int], None]) -> None:
    """Execute every instruction of every rank: ``execute(rank, op, argument)``, each rank's own in order.

    In WAIT a rank waits until all that it shares a message with have started the exchange, and so have those of the
    exchanges that it started before. That is the strictest transport, one that buffers nothing and keeps the order:
    programs that get through here get through any other.

    Raises:
        DeadlockError: if no rank can go on.
    """
    peers = [_peers(one) for one in passes]
    position = [0] * len(passes)
    started: list[dict[int, None]] = [{} for _ in passes]  # in the order of their start

    def missing(rank: int, exchange: int) -> list[int]:
        """The ranks that this rank has to wait for."""
        if exchange not in started[rank]:
            raise DeadlockError(f"rank {rank} waits in exchange {exchange}, which it hasn't started")
        before = list(started[rank])
        before = before[: before.index(exchange) + 1]
        return sorted({peer for x in before for peer in peers[rank].get(x, ()) if x not in started[peer]})

    moved = True
    while moved:
        moved = False
        for rank, one in enumerate(passes):
            while position[rank] < len(one.program):
                op, argument = Op(one.program[position[rank], 0]), int(one.program[position[rank], 1])
                if op == Op.WAIT and missing(rank, argument):
                    break
                execute(rank, op, argument)
                if op == Op.START:
                    started[rank][argument] = None
                position[rank] += 1
                moved = True
    stuck = [rank for rank, one in enumerate(passes) if position[rank] < len(one.program)]
    if stuck:
        exchange = int(passes[stuck[0]].program[position[stuck[0]], 1])
        raise DeadlockError(
            f"ranks {stuck} can't go on: rank {stuck[0]} waits in exchange {exchange}, or in one that it started before, "
            f"for ranks {missing(stuck[0], exchange)}"
        )


def _peers(one: PassPlan) -> dict[int, list[int]]:
    """The ranks that this rank shares a message with, by exchange."""
    pairs = np.unique(one.messages[:, [Message.EXCHANGE, Message.PEER]], axis=0)
    result: dict[int, list[int]] = {}
    for exchange, peer in pairs.tolist():
        result.setdefault(exchange, []).append(peer)
    return result
