"""The sizes and dimensions of the device mesh, as Accelerate reads them: it sees none of its own context parallelism."""

from __future__ import annotations

from typing import Any

from accelerate.parallelism_config import ParallelismConfig

from hf_dcp.integrations.process_groups import DCP_DIM

MESH_ORDER = ("dp_replicate", "dp_shard", DCP_DIM, "tp")
"""From the slowest to the fastest changing rank: neighbours are ranks of a TP group, then of a DCP group."""


class MeshWithDcp(ParallelismConfig):
    """Adds a dimension for DCP to Accelerate's mesh.

    Args:
        dcp_size: ranks of a DCP group; a field of the subclass.
    """

    dcp_size: int
    _size_given: bool
    """Whether anybody has chosen it."""

    @property
    def dcp_enabled(self) -> bool:
        """Whether a DCP group has more than one rank."""
        return self.dcp_size > 1

    @property
    def total_size(self) -> int:
        return super().total_size * self.dcp_size

    @property
    def non_data_parallel_size(self) -> int:
        return super().non_data_parallel_size * self.dcp_size

    @property
    def non_dp_dim_names(self) -> list[str]:
        return super().non_dp_dim_names + self._dcp_dim

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        return super().dp_shard_cp_dim_names + self._dcp_dim

    @property
    def dp_cp_dim_names(self) -> list[str]:
        return super().dp_cp_dim_names + self._dcp_dim

    @property
    def _dcp_dim(self) -> list[str]:
        return [DCP_DIM] if self.dcp_enabled else []

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Names and sizes of the mesh dimensions, in the order in which Accelerate unpacks them."""
        sizes = self._sizes | {DCP_DIM: self.dcp_size}
        names = tuple(name for name in MESH_ORDER if name in self.active_mesh_dims)
        return names, tuple(sizes[name] for name in names)

    def settle_sizes(self, world: int) -> None:
        """Give data parallelism the processes that are left over. Raises ValueError if the sizes don't fit."""
        if world > 1 and not self._size_given:
            raise ValueError(
                f"dcp_size is not given and there are {world} processes, which would train without DCP: pass dcp_size=... "
                "or set HF_DCP_SIZE (accelerate drops it from the parallelism_config of a YAML file); 1 is data parallel"
            )
        if world % self.non_data_parallel_size:
            beside = f" times tp_size={self.tp_size}" if self.tp_size > 1 else ""
            raise ValueError(
                f"dcp_size={self.dcp_size}{beside} does not divide the number of processes, {world}: start a "
                f"multiple of "
                f"{self.non_data_parallel_size} processes (accelerate launch, torchrun), or set another dcp_size"
            )
        if self.data_parallel_size == 1:
            self._set_size("dp_replicate", world // self.non_data_parallel_size)
        if self.total_size != world:
            raise ValueError(
                f"dp_replicate_size={self.dp_replicate_size}, dp_shard_size={self.dp_shard_size}, "
                f"dcp_size={self.dcp_size} "
                f"and tp_size={self.tp_size} make {self.total_size} processes, but there are {world}: leave the data "
                "parallel sizes out"
            )

    def _validate_accelerator(self, accelerator: Any) -> None:
        """Accelerate's own check knows neither gloo nor a ``"cp"`` dimension of size 1; ours ran with the mesh."""
        if accelerator.num_processes != self.total_size:
            raise ValueError(
                f"the parallelism configuration was set up for {self.total_size} processes, but the Accelerator has "
                f"{accelerator.num_processes}"
            )
