#!/usr/bin/env python
"""Whole steps at the paper's scale, as predicted: Llama3-8B, tensor parallelism 4 x DCP 16, 8 nodes of 8 A100.

    python benchmarks/paper_scale.py [--batches 4]

Of the 64 GPUs, 16 form a DCP group, 2 on each node, with a quarter of the heads and of the weights each. The step's
attention is simulated from plans, all else counted as arithmetic at the same rate; nothing here is measured. Batches of
131,072 tokens resemble LongAlign and LDC.
"""

from __future__ import annotations

import argparse
from itertools import islice

from lengths import batches, read_distributions

from hf_dcp.config import DcpConfig
from hf_dcp.estimate.hardware import Hardware
from hf_dcp.estimate.schemes import Setting, evaluate
from hf_dcp.estimate.summary import best_static, summarise
from hf_dcp.planning.batch import ModelShape, Topology

TP = 4
LAYERS, PARAMETERS = 32, 8_030_261_248
SHAPE = ModelShape(heads=32 // TP, kv_heads=8 // TP, head_dim=128, dtype="bf16", windows=((None, LAYERS),))
TOPOLOGY = Topology.grid(8, 2)
TOKENS = 131_072
DATASETS = ("longalign_10k", "ldc_reconstructed")
MASKS = ("causal", "lambda:64,4096", "blockwise:256,2,1,1", "shared:0.2x4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=4, help="batches of each data set")
    parser.add_argument("--hardware", default="a100-efa")
    options = parser.parse_args()
    rates = Hardware.named(options.hardware).rates
    setting = Setting(TOPOLOGY, SHAPE, DcpConfig(), rates, 6 * PARAMETERS // TP)
    print(
        "| data set | mask | step of DCP | attention in it | over dense zigzag | over the best dense | attention alone |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in DATASETS:
        drawn = list(islice(batches(read_distributions()[name], 1.0, TOKENS, 0), options.batches))
        for mask in MASKS:
            schemes = summarise([evaluate((batch, mask, setting)) for batch in drawn])
            dcp, zigzag, best = schemes["DCP"], schemes["zigzag"], best_static(schemes)
            print(
                f"| {name} | {mask} | {dcp.step_s:.2f} s | {dcp.attention_s / dcp.step_s:.0%} | {zigzag.speedup:.2f} "
                f"({zigzag.spread[0]:.2f} – {zigzag.spread[1]:.2f}) | {schemes[best].speedup:.2f} ({best}) "
                f"| {schemes[best].attention_speedup:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
