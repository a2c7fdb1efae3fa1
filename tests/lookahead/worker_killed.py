"""One rank: trains until it is told to stop, and says what ended it. Started once per rank, as by a launcher."""

from __future__ import annotations

import multiprocessing
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.lookahead.chaos import Training


def main(url: str, victim: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    training = Training(url, timeout=20.0)
    iterator = iter(training.loader)
    try:
        for _ in training.one_by_one(iterator, stop=20):
            if len(training.batches) == 5 and dist.get_rank() == victim:
                (worker,) = multiprocessing.active_children()
                print("killed", time.time(), flush=True)
                worker.kill()
    except Exception as error:
        print("ended", time.time(), type(error).__name__, str(error).replace("\n", " "), flush=True)
        raise


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
