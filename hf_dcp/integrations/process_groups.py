"""Setting up a DCP group: who is where, who plans with whom, and where plans are exchanged."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hf_dcp.integrations import attention
from hf_dcp.lookahead.redis_settings import SCHEMES, RedisSettings
from hf_dcp.lookahead.session import Group
from hf_dcp.lookahead.store import StoreAddress, StoreError
from hf_dcp.planning.batch import Topology
from hf_dcp.runtime import Communicator

DCP_DIM = "cp"
"""Accelerate gives ranks along a dimension of this name the same batch."""

_servers: dict[str, dist.TCPStore] = {}
"""Plan stores that this process serves, by prefix: they live as long as the process."""


def gather_texts(text: str, device: torch.device | str = "cpu") -> list[str]:
    """The text of every process, in rank order. Nothing is unpickled. Collective over all processes."""
    data = bytearray(text.encode())
    sizes = [int(size) for size in _gather(torch.tensor([len(data)], device=device))]
    data.extend(bytes(max(sizes) + 1 - len(data)))
    frames = _gather(torch.frombuffer(data, dtype=torch.uint8).to(device))
    return [bytes(frame.cpu().numpy())[:size].decode() for frame, size in zip(frames, sizes, strict=True)]


def _gather(mine: torch.Tensor) -> list[torch.Tensor]:
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return everyone


def collective_device(device_type: str) -> torch.device:
    """Where tensors for collective calls of the default process group have to be."""
    if device_type == "cuda" and dist.get_backend() != "gloo":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def host_name() -> str:
    """The node of this process: ``HF_DCP_NODE`` where host names don't tell nodes apart, else the host name."""
    return os.environ.get("HF_DCP_NODE") or socket.gethostname()


def require_agreement(fingerprint: str, device: torch.device | str) -> list[str]:
    """Host names of all processes, after a check that all have the same settings. Collective over all processes.

    Raises:
        ValueError: on every process, if the settings differ.
    """
    answers = [text.split("\n", 1) for text in gather_texts(f"{fingerprint}\n{host_name()}", device)]
    ranks: dict[str, list[int]] = {}
    for rank, (other, _) in enumerate(answers):
        ranks.setdefault(other, []).append(rank)
    if len(ranks) > 1:
        text = "; ".join(f"{settings} on ranks {those}" for settings, those in ranks.items())
        raise ValueError(f"the processes have different DCP settings ({text}): give all the same")
    return [host for _, host in answers]


def dcp_groups(mesh: DeviceMesh) -> list[list[int]]:
    """The global ranks of every DCP group of a mesh, each in the order of its ranks."""
    names = mesh.mesh_dim_names or ()
    if DCP_DIM not in names:
        return [[rank] for rank in mesh.mesh.flatten().tolist()]
    dim = names.index(DCP_DIM)
    return mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist()


def dp_position(mesh: DeviceMesh) -> tuple[int, int]:
    """(index, number) of this process's group among those with batches of their own."""
    index, number = 0, 1
    for name in mesh.mesh_dim_names or ():
        if name in ("dp_replicate", "dp_shard"):
            size = mesh[name].size()
            index, number = index * size + mesh.get_local_rank(name), number * size
    return index, number


def make_group(mesh: DeviceMesh, hosts: Sequence[str], plan_store: str, timeout: float) -> Group:
    """Make communicator and plan store. Collective over all processes."""
    groups = dcp_groups(mesh)
    own = next(ranks for ranks in groups if dist.get_rank() in ranks)
    communicator = Communicator.create(groups) if len(own) > 1 else None
    attention.group_size = len(own)
    dp_rank, dp_size = dp_position(mesh)
    device = collective_device(mesh.device_type)
    return Group(
        rank=own.index(dist.get_rank()),
        topology=Topology.from_hosts([hosts[rank] for rank in own]),
        communicator=None if communicator is None else communicator.id,
        dp_rank=dp_rank,
        dp_size=dp_size,
        address=_of_group(store_address(plan_store, device), own[0], gather_texts(secrets.token_hex(16), device)[0]),
        timeout=timeout,
    )


def single_group(timeout: float) -> Group:
    """The group of a process that is alone."""
    attention.group_size = 1
    return Group(0, Topology((0,)), None, 0, 1, StoreAddress("local", _run_id()), timeout)


def store_address(plan_store: str, device: torch.device) -> StoreAddress:
    """Where plans are exchanged; the same on all processes. Collective.

    The launcher's own store is used where all processes reach it, else rank 0 serves one on a free port.
    """
    run = gather_texts(_run_id(), device)[0]
    if plan_store == "local":
        return StoreAddress("local", run)
    if plan_store.partition(":")[0] in SCHEMES:
        return _redis_address(plan_store, run, device)
    offered = StoreAddress(
        "torch", f"hf_dcp/{run}", os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT") or 0)
    )
    if all(text == "yes" for text in gather_texts("yes" if _reachable(offered) else "no", device)):
        return offered
    own = ""
    if dist.get_rank() == 0:
        _servers[run] = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        own = f"{_address_of_rank_0()}\n{_servers[run].port}"
    host, port = gather_texts(own, device)[0].split("\n")
    return StoreAddress("torch", f"hf_dcp/{run}", host, int(port))


def _redis_address(plan_store: str, run: str, device: torch.device) -> StoreAddress:
    """The address of a Redis server that every process can use. Collective.

    Raises:
        ValueError: on every process, if one of them can't use it: a wrong address is not to become a slow run.
    """
    answers = gather_texts(_redis_trouble(plan_store, run), device)
    for rank, text in enumerate(answers):
        if text:
            raise ValueError(f"rank {rank} can't use the plan store {text}")
    settings = RedisSettings.parse(plan_store)
    return StoreAddress("redis", f"{settings.prefix}/{run}", redis=settings)


def _redis_trouble(plan_store: str, run: str) -> str:
    """What is wrong with a Redis server, as this process sees it; empty if nothing is."""
    from hf_dcp.lookahead.redis_store import REDIS_EXTRA, RedisStore, clear_at_exit

    try:
        settings = RedisSettings.parse(plan_store)
        address = StoreAddress("redis", f"{settings.prefix}/{run}", redis=settings)
        store = address.open()
        assert isinstance(store, RedisStore)
        store.check()
        store.close()
        clear_at_exit(address)
    except ModuleNotFoundError:
        return REDIS_EXTRA
    except (ValueError, StoreError) as error:
        return str(error)
    return ""


def _of_group(address: StoreAddress, first_rank: int, secret: str) -> StoreAddress:
    """Groups of one run have keys of their own: they don't make the same steps at the same time."""
    return replace(address, prefix=f"{address.prefix}/{first_rank}", secret=secret.encode())


def _run_id() -> str:
    return secrets.token_hex(8)


def _reachable(address: StoreAddress) -> bool:
    if not address.host or not address.port:
        return False
    try:
        # First a plain connection: the store's own client would retry for long, and loudly.
        socket.create_connection((address.host, address.port), timeout=5.0).close()
        address.open(timeout=10.0)
    except (OSError, StoreError):
        return False
    return True


def _address_of_rank_0() -> str:
    """Where other processes reach rank 0: MASTER_ADDR names its host if it is set."""
    return os.environ.get("MASTER_ADDR") or ("127.0.0.1" if _one_host() else socket.gethostname())


def _one_host() -> bool:
    """Whether all processes are on this host, as far as launchers say."""
    local, world = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    return local is None or local == world
