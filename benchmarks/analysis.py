"""The numbers behind the plots of docs/analysis.md: what bytes and planning depend on, and predicted training steps.

`recipes/figures.py` calls this and draws. Each function returns rows, dictionaries of plain numbers, of one plot.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from benchmarks.lengths import batches, read_distributions
from hf_dcp.bench.batches import attended, with_mask
from hf_dcp.bench.planner import PARTS, timed_plan
from hf_dcp.config import DcpConfig
from hf_dcp.estimate.schemes import DCP, Setting, outcomes
from hf_dcp.planning.batch import ModelShape, Topology
from hf_dcp.planning.objective import Score
from hf_dcp.planning.static import dense_bytes

Row = dict[str, Any]
MASKS = ("causal", "lambda:64,4096", "blockwise:256,2,1,1", "shared:0.2x4")
BLOCK_SIZES = (512, 1024, 2048, 4096)
EPSILONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
SPARSE = (
    "causal",
    *(f"lambda:64,{window}" for window in (512, 2048, 8192, 32768)),
    *(f"blockwise:{size},2,1,1" for size in (128, 512, 2048)),
    *(f"shared:{share}x{answers}" for share, answers in ((0.05, 4), (0.1, 4), (0.2, 2), (0.2, 4), (0.1, 8))),
)
PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Scale:
    """How large the study is."""

    tokens: int = 131_072
    """Tokens of a batch, at most."""
    batches: int = 3
    """Batches of which the median is taken."""
    nodes: int = 4
    devices: int = 8
    """Per node."""

    @property
    def topology(self) -> Topology:
        return Topology.grid(self.nodes, self.devices)

    def lengths(self, dataset: str = "longalign_10k") -> list[list[int]]:
        """Batches that resemble the data set; lengths shrink with the tokens of a batch."""
        source = read_distributions()[dataset]
        return list(islice(batches(source, self.tokens / 131_072, self.tokens, seed=0), self.batches))


SHAPE = ModelShape(heads=8, kv_heads=2, head_dim=128)


def by_block_size(scale: Scale) -> Iterator[Row]:
    """Bytes, the busiest device's bytes, and CPU seconds by part, against the block size."""
    for mask in MASKS:
        for size in (*BLOCK_SIZES, "auto"):
            yield {"mask": mask, "block_size": size, **_planned(scale, mask, DcpConfig(block_size=size))}


def by_sparsity(scale: Scale) -> Iterator[Row]:
    """Bytes against the attended share of the causal mask."""
    for mask in SPARSE:
        shares = [attended(with_mask(one, mask)) / attended(with_mask(one, "causal")) for one in scale.lengths()]
        yield {"mask": mask, "share": statistics.median(shares), **_planned(scale, mask, DcpConfig())}


def by_epsilon(scale: Scale) -> Iterator[Row]:
    """Bytes against the compute imbalance that is allowed."""
    for mask in MASKS:
        for epsilon in EPSILONS:
            yield {"mask": mask, "epsilon": epsilon, **_planned(scale, mask, DcpConfig(epsilon=epsilon))}


def _planned(scale: Scale, mask: str, config: DcpConfig) -> Row:
    """Medians over the batches: MB of forward and backward, and CPU seconds by part; zigzag as published beside them."""
    rows = []
    for lengths in scale.lengths():
        batch = with_mask(lengths, mask)
        timed = timed_plan(batch, scale.topology, SHAPE, config, repeats=1, warmup=1)
        zigzag = dense_bytes("zigzag", batch, scale.topology, SHAPE)
        rows.append(
            {
                **_megabytes(timed.plan.score),
                "zigzag_inter": sum(zigzag[which]["inter_node_bytes"] for which in PASSES) / 1e6,
                "zigzag_busiest": sum(zigzag[which]["max_device_bytes"] for which in PASSES) / 1e6,
                "imbalance": timed.plan.score.compute_imbalance,
                **{part: timed.cpu_s[part] for part in PARTS},
            }
        )
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def _megabytes(score: Score) -> Row:
    passes = [score.passes[which] for which in PASSES]
    return {
        "inter": sum(one.inter_node for one in passes) / 1e6,
        "total": sum(one.inter_node + one.intra_node for one in passes) / 1e6,
        "busiest": sum(one.max_device for one in passes) / 1e6,
    }


TRAINING_SETS = ("longalign_10k", "ldc_reconstructed")
LONGEST = (1, 2, 4, 8)
"""Rows are cut to the tokens of a batch over these."""
LLAMA_8B, TENSOR_PARALLEL, LAYERS = 8.03e9, 4, 32


def training_steps(scale: Scale) -> Iterator[Row]:
    """Predicted seconds of a training step of a model like Llama3-8B, TP 4, DCP over two ranks a node of twice the nodes:
    DCP, and the best static scheme as published, against the longest row."""
    shape = ModelShape(32 // TENSOR_PARALLEL, 8 // TENSOR_PARALLEL, 128, windows=((None, LAYERS),))
    rest = int(6 * LLAMA_8B / TENSOR_PARALLEL)
    topology = Topology.grid(2 * scale.nodes, 2)
    setting = Setting(topology, shape, DcpConfig(), DcpConfig().rates, flops_per_token=rest)
    for dataset in TRAINING_SETS:
        for part in LONGEST:
            longest = scale.tokens // part
            cut = [_packed(lengths, longest, scale.tokens) for lengths in scale.lengths(dataset)]
            for mask in MASKS:
                found = [outcomes(with_mask(lengths, mask), setting) for lengths in cut]
                static = {name: sum(one[name].step_s for one in found) for name in found[0] if _published(name)}
                best = min(static, key=static.__getitem__)
                dcp = sum(one[DCP].step_s for one in found)
                row = {"dataset": dataset, "longest": longest, "mask": mask, "best": best}
                yield {**row, "dcp_s": dcp / len(found), "static_s": static[best] / len(found)}


def _published(name: str) -> bool:
    return name != DCP and not name.endswith("row-exact")


def _packed(lengths: Sequence[int], longest: int, tokens: int) -> list[int]:
    """Rows cut to ``longest``, repeated until the batch is full again."""
    cut = [min(length, longest) for length in lengths]
    filled, used = list(cut), sum(cut)
    for length in cut * (tokens // max(used, 1)):
        if used + length <= tokens:
            filled.append(length)
            used += length
    return filled


STUDIES: dict[str, Callable[[Scale], Iterator[Row]]] = {
    "block_size": by_block_size,
    "sparsity": by_sparsity,
    "epsilon": by_epsilon,
    "training": training_steps,
}
