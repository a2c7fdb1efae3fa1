"""Which rank is at fault when messages fail: not always the one that a message was to come from.

A rank whose exchange fails writes down whom it waited for, in the store of its process group, and then looks whether
that rank has written down the same of yet another. The chain ends at a rank that reports nothing: it is gone, or hangs.
"""

from __future__ import annotations

import time

import torch.distributed as dist

GRACE_S = 2.0
"""How long the report of a rank is waited for: ranks run into a time-out at slightly different moments."""


def find_silent(group: dist.ProcessGroup, call: int, rank: int, peer: int) -> list[int]:
    """Report that ``rank`` waits for ``peer`` in vain, and follow the reports of others.

    Args:
        call: number of the attention call; reports of earlier ones don't count.
        rank, peer: ranks inside the group.

    Returns:
        The ranks from ``peer`` on, each waiting for the next; the last one has reported nothing, or, where ranks wait for
        each other in a circle, waits for one before it.
    """
    chain = [peer]
    try:
        store = group.get_group_store()
        store.set(_key(call, rank), str(peer))
        while (following := _reported(store, _key(call, chain[-1]))) not in (None, rank, *chain):
            assert following is not None
            chain.append(following)
    except RuntimeError:
        pass  # the store is gone with the rank that held it: this rank has only its own word to give
    return chain


def _key(call: int, rank: int) -> str:
    return f"hf_dcp/call {call}/rank {rank} waits for"


def _reported(store: dist.Store, key: str) -> int | None:
    deadline = time.monotonic() + GRACE_S
    while not store.check([key]):
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)
    return int(store.get(key))
