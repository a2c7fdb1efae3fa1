"""A group of processes on this machine, for self-tests: started, watched, and never left behind."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as multiprocessing


class ProcessFailure(RuntimeError):
    """Some process failed or ran out of time; the text holds what each of them said."""


def run_processes(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    group_timeout: float = 60.0,
    expect_failure: bool = False,
    backend: str = "gloo",
) -> list[Any]:
    """Call ``function(*args)`` in new processes that form the default process group.

    Args:
        function: importable by name; its result must be JSON.
        timeout: seconds until all processes print their stacks to standard error and are ended.
        group_timeout: seconds after which a collective call that is stuck fails.
        expect_failure: return {"error": text} for processes that fail, None for those that vanish, instead of raising.

    Returns:
        The result of every rank.

    Raises:
        ProcessFailure: if a process fails, vanishes, or runs out of time.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="hf_dcp_processes_") as folder:
        processes = [
            context.Process(
                target=_main,
                args=(rank, world_size, folder, backend, timeout, group_timeout, function, args),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            _join(processes, time.monotonic() + timeout + 10, patient=expect_failure)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        results = [_read(Path(folder) / f"{rank}.json") for rank in range(world_size)]
    if not expect_failure:
        failed = [
            f"rank {rank}: exit {process.exitcode}: {(result or {}).get('error', 'no result')}"
            for rank, (process, result) in enumerate(zip(processes, results))
            if process.exitcode != 0 or result is None or "error" in result
        ]
        if failed:
            raise ProcessFailure("\n".join(failed))
    return [result if result is None or "error" in result else result["result"] for result in results]


def _join(processes: list[Any], deadline: float, patient: bool) -> None:
    """Wait for all; a while after one has failed, or at the deadline, give up."""
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if not patient and any(process.exitcode not in (None, 0) for process in processes):
            deadline = min(deadline, time.monotonic() + 5)
        time.sleep(0.02)


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def _main(
    rank: int,
    world_size: int,
    folder: str,
    backend: str,
    timeout: float,
    group_timeout: float,
    function: Callable[..., Any],
    args: tuple,
) -> None:
    faulthandler.dump_traceback_later(timeout, exit=True)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    import torch

    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=group_timeout),
    )
    target = Path(folder) / f"{rank}.json"
    try:
        answer = {"result": function(*args)}
        status = 0
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}
        status = 1
    temporary = target.with_suffix(".new")
    temporary.write_text(json.dumps(answer))
    temporary.rename(target)
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's shutdown: threads of a process group whose peers are gone may keep it from ending.
    os._exit(status)
