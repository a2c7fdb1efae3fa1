"""Cases of the self-test: batches, their inputs, and dense attention in fp64 as the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hf_dcp.config import DcpConfig
from hf_dcp.masks import (
    Mask,
    causal,
    documents,
    from_ranges,
    intersect_window,
    normalise,
    parse_mask,
    shared_question,
)
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.runtime.messages import DTYPES

RESULTS = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """One batch, model shape and setting to check."""

    mask: str
    lengths: tuple[int, ...]
    block_size: int
    heads: int = 8
    kv_heads: int = 2
    dtype: str = "fp32"
    head_dim: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    reduce_dtype: str | None = None
    backward_kv: Literal["refetch", "keep"] = "refetch"
    head_groups: int | Literal["auto"] = "auto"
    divisions: int = 4
    nodes: tuple[int, ...] | None = None
    """Node of each rank; None: two ranks per node."""
    seed: int = 0

    @property
    def name(self) -> str:
        """The fields that differ from the defaults."""
        plain = asdict(Case("", (), 0))
        return " ".join(f"{name}={value}" for name, value in asdict(self).items() if value != plain[name])

    @property
    def scaling(self) -> float:
        return 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    @property
    def batch(self) -> BatchSpec:
        return BatchSpec(self.lengths, [resolve_mask(self.mask, length) for length in self.lengths])

    def topology(self, world_size: int) -> Topology:
        return Topology(tuple(rank // 2 for rank in range(world_size)) if self.nodes is None else self.nodes)

    def shape(self) -> ModelShape:
        windows: tuple[tuple[int | None, int], ...] = (
            ((None, 1),) if self.window is None else ((None, 1), (self.window, 1))
        )
        return ModelShape(self.heads, self.kv_heads, self.head_dim, self.dtype, windows)

    def config(self) -> DcpConfig:
        return DcpConfig(
            block_size=self.block_size,
            head_groups=self.head_groups,
            divisions=self.divisions,
            reduce_dtype=self.reduce_dtype,
            backward_kv=self.backward_kv,
            seed=self.seed,
        )


def resolve_mask(text: str, length: int) -> Mask:
    """The mask of one sequence: a mask specification, or one of these, which depend on the length.

    - ``documents``: up to three documents; ``shared``: a question and three unequal answers, one of them empty;
    - ``ranges``: explicit ranges at random: overlapping, empty, of both directions.
    """
    if text == "documents":
        return documents([n for n in (length // 2, length // 3, length - length // 2 - length // 3) if n], causal())
    if text == "shared":
        return shared_question(length - length // 3 - length // 4, [length // 3, 0, length // 4])
    if text == "ranges":
        rng = np.random.default_rng(length)
        ranges = np.sort(rng.integers(0, length + 1, (length, 3, 2)), axis=2).astype(np.int32)
        ranges[rng.random((length, 3)) < 0.4] = 0
        return from_ranges(ranges)
    return parse_mask(text)


@dataclass
class Inputs:
    """Inputs of the whole batch, equal on all ranks: q, dout [N, heads, D], k, v [N, KV heads, D], sinks [heads]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sinks: Tensor | None

    @classmethod
    def of(cls, case: Case) -> Inputs:
        generator = torch.Generator().manual_seed(case.seed)
        tokens, dtype = sum(case.lengths), DTYPES[case.dtype]

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        q, k, v, dout = (
            random(tokens, h, case.head_dim) for h in (case.heads, case.kv_heads, case.kv_heads, case.heads)
        )
        return cls(q, k, v, dout, random(case.heads) if case.sinks else None)


def allowed_of(case: Case) -> Iterator[tuple[slice, Tensor]]:
    """Of every sequence: its tokens, and which of them attend to which, bool[length, length]."""
    batch = case.batch
    for i, (mask, length) in enumerate(zip(batch.masks, batch.lengths)):
        ranges = normalise(mask.ranges(length))
        if case.window is not None:
            ranges = intersect_window(ranges, case.window)
        column = np.arange(length)
        allowed = np.zeros((length, length), bool)
        for r in range(ranges.shape[1]):
            allowed |= (column >= ranges[:, r, :1]) & (column < ranges[:, r, 1:])
        start = int(batch.starts[i])
        yield slice(start, start + length), torch.from_numpy(allowed)


def dense(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    """Results of dense attention in fp64, by autograd: out, dq, dk, dv in the layout of the inputs, and dsinks."""
    q, k, v, dout = (x.double() for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    results = dict(zip(RESULTS, (torch.zeros_like(x) for x in (q, q, k, v))))
    if inputs.sinks is not None:
        results["dsinks"] = torch.zeros(case.heads, dtype=torch.float64)
    for tokens, allowed in allowed_of(case):
        for head in range(case.heads):  # one at a time: a sequence squared is large
            kv_head = head // (case.heads // case.kv_heads)
            leaves = [q[tokens, head], k[tokens, kv_head], v[tokens, kv_head]]
            if inputs.sinks is not None:
                leaves.append(inputs.sinks[head].double())
            leaves = [leaf.clone().requires_grad_() for leaf in leaves]
            out = _dense_head(case, allowed, *leaves)
            gradients = torch.autograd.grad(out, leaves, dout[tokens, head])
            results["out"][tokens, head] = out.detach()
            results["dq"][tokens, head] = gradients[0]
            results["dk"][tokens, kv_head] += gradients[1]
            results["dv"][tokens, kv_head] += gradients[2]
            if inputs.sinks is not None:
                results["dsinks"][head] += gradients[3]
    return results


def _dense_head(case: Case, allowed: Tensor, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
    scores = q @ k.T * case.scaling
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(~allowed, float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink.expand(len(q), 1)], 1)
    top = scores.detach().amax(-1, keepdim=True).clamp(min=-1e300)
    weights = torch.exp(scores - top)
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    return weights[:, : len(k)] @ v


def error_of(case: Case, inputs: Inputs, value: Tensor, reference: Tensor) -> float:
    """max |value - reference|, over max(max |reference|, max |dout| max |v| scale max(|q|, |k|)); infinite for nan."""
    q, k, v, dout = (float(x.abs().max()) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    size = max(float(reference.abs().max()), dout * v * case.scaling * max(q, k))
    error = float((value - reference).abs().max()) / size
    return error if math.isfinite(error) else math.inf
