"""python -m tests.lookahead.worker_killed URL WORLD VICTIM PORT: ranks train; the DataLoader worker of one is killed.

Prints a line for each thing that happens: "killed", "ended RANK" with the error, "exit RANK STATUS", all with the time.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.lookahead.chaos import Training


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, (time.time(), *words))).replace("\n", " ")[:2000] + "\n").encode())


def main(url: str, victim: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    training = Training(url, timeout=20.0)
    iterator = iter(training.loader)
    try:
        for _ in training.one_by_one(iterator, stop=20):
            if len(training.batches) == 5 and dist.get_rank() == victim:
                (worker,) = multiprocessing.active_children()
                say("killed")
                worker.kill()
    except Exception as error:
        say("ended", dist.get_rank(), type(error).__name__, error)
        raise


if __name__ == "__main__":
    url, world, victim, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
    ranks = {}
    for rank in range(world):
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            main(url, victim)
            sys.exit(0)
        ranks[child] = rank
    for _ in range(world):
        child, status = os.wait()
        say("exit", ranks[child], os.waitstatus_to_exitcode(status))
