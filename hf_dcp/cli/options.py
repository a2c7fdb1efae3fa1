"""Options that several commands have, with one text for each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

Lengths = Annotated[str | None, Option(help="Tokens of each sequence of one batch, such as 4096,512.")]
Batches = Annotated[Path | None, Option(help="JSON file: one or more lists of lengths.")]
Masks = Annotated[list[str] | None, Option(help="Mask, such as causal; repeat it for more. Default: causal.")]
Nodes = Annotated[int, Option(help="Nodes of the DCP group.")]
DevicesPerNode = Annotated[int, Option(help="Devices of each node.")]
Heads = Annotated[int, Option(help="Query heads.")]
KvHeads = Annotated[int, Option(help="KV heads.")]
HeadDim = Annotated[int, Option(help="Elements of a head.")]
Dtype = Annotated[str, Option(help="Type of Q, K and V: bf16, fp16, fp32 or fp64.")]
ReduceDtype = Annotated[str | None, Option(help="Type of partial results on the wire; default: --dtype.")]
BlockSize = Annotated[str, Option(help="Tokens of a block, or auto.")]
HeadGroups = Annotated[str, Option(help="Head groups, or auto.")]
Epsilon = Annotated[str | None, Option(help="Allowed compute imbalance, or auto: by predicted time.")]
EpsilonInter = Annotated[float | None, Option(help="Allowed compute imbalance between nodes.")]
EpsilonIntra = Annotated[float | None, Option(help="Allowed compute imbalance inside a node.")]
TokenTolerance = Annotated[float | None, Option(help="Allowed token imbalance.")]
Divisions = Annotated[int | None, Option(help="At most so many divisions per attention call.")]
Windows = Annotated[list[str] | None, Option(help="Layers by window, such as none:4,4096:20.")]
Seed = Annotated[int | None, Option(help="Seed of the planner.")]
BackwardKv = Annotated[str | None, Option(help="refetch or keep remote rows for backward.")]
Hardware = Annotated[str | None, Option(help="Preset, or JSON file of hf-dcp bench calibrate, for predictions.")]
Divide = Annotated[int, Option(help="Divide all lengths by this.")]
Limit = Annotated[int | None, Option(help="Only the first so many batches.")]
Json = Annotated[bool, Option("--json", help="Print JSON, alone on standard output.")]
