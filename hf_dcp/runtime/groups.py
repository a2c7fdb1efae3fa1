"""Process groups of a DCP group, and what is counted on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from hf_dcp.runtime.buffers import BufferPool


@dataclass
class Stats:
    """What attention calls did, added up until `reset`."""

    calls: Counter[str] = field(default_factory=Counter)
    """Executed calls by pass: "forward", "backward"."""
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Payload bytes sent, by (pass, "inter" or "intra"): between nodes, or inside a node."""
    sent_to: Counter[tuple[str, int]] = field(default_factory=Counter)
    """The same bytes by (pass, rank in the group that they were sent to)."""

    def reset(self) -> None:
        for counter in (self.calls, self.sent, self.sent_to):
            counter.clear()


@dataclass(eq=False)
class Communicator:
    """One DCP group of ranks as the executor uses it: make it once, on all ranks, with `create`.

    Inputs travel on one process group, partial results on another, so that neither waits behind the other. Plans name
    their communicator by its ``id``, a small number that survives pickling; it stays registered until `close`.
    """

    forward_group: dist.ProcessGroup
    reverse_group: dist.ProcessGroup
    ranks: tuple[int, ...]
    """Global rank of every rank of the group."""
    rank: int
    """This rank inside the group."""
    id: int = -1
    stats: Stats = field(default_factory=Stats)
    sequence: int = 0
    """Attention calls so far: equal on all ranks, since all make the same calls in the same order."""
    host_group: dist.ProcessGroup | None = None
    """For numbers that the host needs, where the other groups are of a GPU and the host would wait for the device."""
    _buffers: dict[torch.device, BufferPool] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @classmethod
    def create(
        cls,
        groups: Sequence[Sequence[int]] | None = None,
        timeout: timedelta | None = None,
        backend: str | None = None,
    ) -> Communicator:
        """Make the process groups of all DCP groups; collective over all ranks of the default process group.

        Args:
            groups: the global ranks of every DCP group, in the order of ranks inside it; None: one group of all ranks.
            timeout: after how long a rank that doesn't answer is an error; None: as the default process group.
            backend: None: as the default process group.

        Returns:
            The communicator of the group that this rank is in.

        Raises:
            ValueError: if this rank is in no group, or in more than one.
        """
        world = dist.get_world_size()
        timeout = _default_timeout() if timeout is None else timeout
        everything = [tuple(range(world))] if groups is None else [tuple(group) for group in groups]
        if sorted(rank for group in everything for rank in group) != list(range(world)):
            raise ValueError(f"groups must name each of the {world} ranks once, not {everything}")
        own = None
        for ranks in everything:
            pair = [dist.new_group(list(ranks), timeout=timeout, backend=backend) for _ in range(2)]
            host = dist.new_group(list(ranks), timeout=timeout, backend="gloo") if _of_gpu(backend) else None
            if dist.get_rank() in ranks:
                own = cls(pair[0], pair[1], ranks, ranks.index(dist.get_rank()), host_group=host)
        assert own is not None
        own._warm_up()
        return register(own)

    def _warm_up(self) -> None:
        """Some backends connect at the first call, and then want all ranks to take part."""
        for group in (self.forward_group, self.reverse_group):
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)

    @property
    def device(self) -> torch.device:
        """Where small tensors for collective calls have to be."""
        backend = dist.get_backend(self.forward_group)
        return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")

    @property
    def coalesces(self) -> bool:
        """Whether messages that are posted together must be handed over as one."""
        return dist.get_backend(self.forward_group) == "nccl"

    def buffers(self, device: torch.device) -> BufferPool:
        """Memory that the attention calls of all plans on a device share."""
        return self._buffers.setdefault(device, BufferPool(device))

    def gather_numbers(self, values: Sequence[int]) -> list[list[int]]:
        """The same few int64 of every rank, in rank order. Collective over the group."""
        group = self.host_group or self.forward_group
        mine = torch.tensor(list(values), dtype=torch.int64, device="cpu" if self.host_group else self.device)
        rows = [torch.empty_like(mine) for _ in self.ranks]
        dist.all_gather(rows, mine, group=group)
        # The process group orders its ranks by their global rank, whatever order it was asked for.
        return [rows[dist.get_group_rank(group, rank)].tolist() for rank in self.ranks]

    def close(self) -> None:
        """Destroy the process groups and forget the id."""
        _COMMUNICATORS.pop(self.id, None)
        for group in (self.forward_group, self.reverse_group, self.host_group):
            if group is not None:
                dist.destroy_process_group(group)


def _of_gpu(backend: str | None) -> bool:
    return "nccl" in (backend or dist.get_backend())


def _default_timeout() -> timedelta | None:
    """The time-out of the default process group, which `new_group` does not take over by itself."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    try:
        return dist.group.WORLD._get_backend(device).options._timeout  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):
        return None


_COMMUNICATORS: dict[int, Communicator] = {}


def register(communicator: Communicator) -> Communicator:
    """Give it the next free id."""
    communicator.id = max(_COMMUNICATORS, default=-1) + 1
    _COMMUNICATORS[communicator.id] = communicator
    return communicator


def find_communicator(id: int | None, world_size: int) -> Communicator:
    """The communicator with this id, or for None the only one there is.

    Raises:
        RuntimeError: if there is none, or None names none of several, or its size is not ``world_size``.
    """
    if id is None:
        if len(_COMMUNICATORS) != 1:
            raise RuntimeError(
                f"the plan names no communicator and there are {len(_COMMUNICATORS)}: "
                "make one with Communicator.create() and give its id to the DcpPlan"
            )
        found = next(iter(_COMMUNICATORS.values()))
    elif id not in _COMMUNICATORS:
        raise RuntimeError(f"there is no communicator {id} in this process: make it with Communicator.create() first")
    else:
        found = _COMMUNICATORS[id]
    if found.world_size != world_size:
        raise RuntimeError(f"the plan is for {world_size} ranks, its communicator has {found.world_size}")
    return found
