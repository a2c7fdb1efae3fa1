"""The processes of a benchmark: one alone, or those that torchrun, or benchmarks/netcluster, has started."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hf_dcp.planning.batch import Topology
from hf_dcp.runtime.groups import Communicator

TIMEOUT = timedelta(minutes=10)


@dataclass
class Group:
    """This process among those of the benchmark. Every method is collective."""

    rank: int
    topology: Topology
    device: torch.device
    communicator: Communicator | None

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    @classmethod
    def join(cls, device: str = "cpu", nodes: int | None = None) -> Group:
        """Join the group that the environment names, or be alone if it names none.

        Args:
            nodes: as if the ranks were on so many nodes; None: the nodes that the launcher has started them on.

        Raises:
            ValueError: if the ranks can't be dealt evenly to ``nodes``.
        """
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if nodes is not None and (nodes < 1 or world % nodes):
            raise ValueError(f"--nodes must divide the number of processes, {world}, which {nodes} does not")
        where = torch.device(device)
        if where.type == "cuda":
            where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(where)
        if world == 1:
            return cls(0, Topology((0,)), where, None)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if where.type == "cuda" else "gloo", timeout=TIMEOUT)
        group = cls(dist.get_rank(), Topology.grid(1, world), where, None)
        hosts = group.gather(_node())
        group.topology = Topology.from_hosts(hosts) if nodes is None else Topology.grid(nodes, world // nodes)
        group.communicator = Communicator.create()
        return group

    def leave(self) -> None:
        if self.communicator is not None:
            self.communicator.close()
            dist.destroy_process_group()

    def barrier(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.world_size > 1:
            dist.barrier()

    def gather(self, value: Any) -> list[Any]:
        """The JSON value of every rank, in rank order."""
        data = json.dumps(value).encode()
        if self.world_size == 1:
            return [json.loads(data)]
        size = torch.tensor([len(data)], device=self.device)
        sizes = [torch.empty_like(size) for _ in range(self.world_size)]
        dist.all_gather(sizes, size)
        width = max(int(s) for s in sizes)
        mine = torch.frombuffer(bytearray(data.ljust(width)), dtype=torch.uint8).to(self.device)
        everyone = [torch.empty_like(mine) for _ in sizes]
        dist.all_gather(everyone, mine)
        return [json.loads(bytes(other.cpu().numpy())) for other in everyone]

    def scatter(self, source: int, parts: list[bytes] | None) -> bytes:
        """What ``source`` has for this rank: ``parts`` by rank there, anything elsewhere."""
        if self.world_size == 1:
            assert parts is not None
            return parts[0]
        sizes = torch.tensor([len(p) for p in parts] if parts else [0] * self.world_size, device=self.device)
        dist.broadcast(sizes, source)
        width = int(sizes.max())
        mine = torch.empty(width, dtype=torch.uint8, device=self.device)
        padded = None
        if parts is not None:
            padded = [
                torch.frombuffer(bytearray(p.ljust(width, b"\0")), dtype=torch.uint8).to(self.device) for p in parts
            ]
        dist.scatter(mine, padded, source)
        return bytes(mine[: int(sizes[self.rank])].cpu().numpy())


def _node() -> str:
    """What tells this process' node from others: a name given for it, the launcher's number of it, its host name."""
    return os.environ.get("HF_DCP_NODE") or f"{os.environ.get('GROUP_RANK', '')}@{socket.gethostname()}"
