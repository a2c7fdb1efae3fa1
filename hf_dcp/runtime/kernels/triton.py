"""Launching the Triton kernels: tensors of a rank plan to kernel arguments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hf_dcp.runtime.kernels.tile_list import TileList
from hf_dcp.runtime.kernels.tuning import Config, head_parts
from hf_dcp.runtime.kernels.upload import upload
from hf_dcp.runtime.rows import Rows

ROWS_PER_PROGRAM = 16
"""Of the kernels that merge and finish rows."""


@dataclass(frozen=True)
class DeviceTiles:
    """A tile list on a device."""

    host: TileList
    q_blocks: Tensor
    q_entries: Tensor
    kv_blocks: Tensor
    kv_entries: Tensor
    ranges: Tensor

    @classmethod
    def of(cls, tiles: TileList, device: torch.device) -> DeviceTiles:
        arrays = (tiles.q_blocks, tiles.q_entries, tiles.kv_blocks, tiles.kv_entries, tiles.ranges)
        return cls(tiles, *upload(arrays, device))


@dataclass
class Source:
    """Rows of an input as kernels read them.

    Args:
        local: [heads, S, D].
        remote: where received rows lie, of local's dtype.
        table: int32[remote rows]: offset of each in ``remote``, in units of 16 bytes.
    """

    local: Tensor
    remote: Tensor
    table: Tensor

    @classmethod
    def of(cls, rows: Rows) -> Source:
        """Rows whose remote part is contiguous, in the order of places."""
        width = rows.remote[0].numel() if len(rows.remote) else 0
        table = torch.arange(len(rows.remote), dtype=torch.int32, device=rows.remote.device)
        return cls(aligned(rows.local), rows.remote, table * (width // unit(rows.local.dtype)))

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.local, self.remote, self.table

    @property
    def strides(self) -> tuple[int, int]:
        return self.local.stride(0), self.local.stride(1)


def unit(dtype: torch.dtype) -> int:
    """Elements of 16 bytes."""
    return 16 // dtype.itemsize


def aligned(x: Tensor) -> Tensor:
    """``x`` [heads, S, D] itself if each of its rows is a run of memory that begins at a multiple of 16 bytes."""
    step = unit(x.dtype)
    if x.stride(2) == 1 and x.stride(0) % step == 0 and x.stride(1) % step == 0 and x.data_ptr() % 16 == 0:
        return x
    return x.contiguous()


@dataclass(frozen=True)
class TritonKernel:
    """The kernels of one attention call.

    Args:
        heads: query heads of one head group.
        kv_heads: KV heads of one head group.
        scale, softcap: see `hf_dcp.runtime.attend.Kernel`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    num_local: int
    scale: float
    softcap: float | None
    exact: bool

    @cached_property
    def _per_kv_head(self) -> int:
        return self.heads // self.kv_heads

    def forward(
        self, tiles: DeviceTiles, config: Config, q: Source, k: Source, v: Source, out: Rows, lse: Rows
    ) -> None:
        """Attention over the tiles, merged into (out, lse); both fp32."""
        from hf_dcp.runtime.kernels.triton_forward import forward

        self._launch(
            forward,
            (len(tiles.q_blocks), self.kv_heads * (self._per_kv_head // config.pack)),
            config,
            q.local.dtype,
            (*q.pointers, *k.pointers, *v.pointers, out.local, out.remote, lse.local, lse.remote),
            (tiles.q_blocks, tiles.q_entries, tiles.ranges),
            (*q.strides, *k.strides, *v.strides, *strides(out), *strides(lse)),
        )

    def backward_q(
        self, tiles: DeviceTiles, config: Config, q: Source, grad: Source, k: Source, v: Source,
        lse: Rows, delta: Rows, dq: Rows,
    ) -> None:  # fmt: skip
        """The tiles' share in dQ, added to it. ``lse`` is the final one, +inf for rows that attend to nothing."""
        from hf_dcp.runtime.kernels.triton_dq import dq as kernel

        self._launch(
            kernel,
            (len(tiles.q_blocks), self.kv_heads * (self._per_kv_head // config.pack)),
            config,
            q.local.dtype,
            (*q.pointers, *grad.pointers, *k.pointers, *v.pointers, *(x for r in (lse, delta, dq) for x in both(r))),
            (tiles.q_blocks, tiles.q_entries, tiles.ranges),
            (*q.strides, *grad.strides, *k.strides, *v.strides, *strides(lse), *strides(delta), *strides(dq)),
        )

    def backward_kv(
        self, tiles: DeviceTiles, config: Config, q: Source, grad: Source, k: Source, v: Source,
        lse: Rows, delta: Rows, dk: Rows, dv: Rows,
    ) -> None:  # fmt: skip
        """The tiles' share in dK and dV, added to them."""
        from hf_dcp.runtime.kernels.triton_dkv import dkv as kernel

        results = (lse, delta, dk, dv)
        self._launch(
            kernel,
            (len(tiles.kv_blocks), self.kv_heads),
            config,
            q.local.dtype,
            (*q.pointers, *grad.pointers, *k.pointers, *v.pointers, *(x for r in results for x in both(r))),
            (tiles.kv_blocks, tiles.kv_entries, tiles.ranges),
            (*q.strides, *grad.strides, *k.strides, *v.strides, *(s for r in results for s in strides(r))),
        )

    def _launch(
        self, kernel: Any, grid: tuple[int, int], config: Config, dtype: torch.dtype,
        tensors: tuple, lists: tuple, local_strides: tuple[int, ...],
    ) -> None:  # fmt: skip
        if grid[0] == 0:
            return
        first, second = head_parts(self.head_dim)
        kernel[grid](
            *tensors, *lists, self.num_local, self.kv_heads, self._per_kv_head, *local_strides,
            self.scale, self.softcap or 0.0,
            PACK=config.pack, T=config.tokens, BM=config.rows, BN=config.columns, D1=first, D2=second,
            UNIT=unit(dtype), CAPPED=self.softcap is not None, EXACT=self.exact,
            num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=True,
        )  # fmt: skip

    def merge(self, part: Tensor, part_lse: Tensor, rows: Tensor, out: Rows, lse: Rows) -> None:
        """Merge received partial results into (out, lse).

        Args:
            part: [count, heads of a group, D], any float type; part_lse: [count, heads of a group], fp32.
            rows: int32[count, 2]: place and head group.
        """
        from hf_dcp.runtime.kernels.triton_merge import merge_rows

        merge_rows[(-(-len(rows) // ROWS_PER_PROGRAM), self.heads)](
            part, part_lse, rows, *both(out), *both(lse), len(rows), self.num_local, self.heads,
            *strides(out), *strides(lse), N=ROWS_PER_PROGRAM, D=self.head_dim, DP=power(self.head_dim),
        )  # fmt: skip

    def finish(self, out: Rows, lse: Rows, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The local rows of ``out`` in the type of the result, [S, heads, D]; sinks [heads] enter here, also ``lse``."""
        from hf_dcp.runtime.kernels.triton_merge import finish_rows

        heads, count, dim = out.local.shape
        result = out.local.new_empty((count, heads, dim), dtype=dtype)
        finish_rows[(-(-count // ROWS_PER_PROGRAM), heads)](
            out.local, lse.local, lse.local if sinks is None else sinks, result, count,
            *strides(out), *strides(lse), result.stride(1), result.stride(0),
            SINKS=sinks is not None, N=ROWS_PER_PROGRAM, D=dim, DP=power(dim),
        )  # fmt: skip
        return result


def both(rows: Rows) -> tuple[Tensor, Tensor]:
    return rows.local, rows.remote


def strides(rows: Rows) -> tuple[int, int]:
    """Of the local part: of a head, of a row."""
    return rows.local.stride(0), rows.local.stride(1)


def power(n: int) -> int:
    """The smallest power of 2 that is not below n."""
    return 1 << (n - 1).bit_length()
