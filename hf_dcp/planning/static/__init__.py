"""Static context parallelism as it is published, as rank plans for the same executor.

The schemes cut every sequence over all ranks, and move every KV row to every rank of its ring, whatever the mask says:
``ring`` (ring attention, contiguous chunks), ``zigzag`` (ring-flash-attention), ``head-ring`` (TransformerEngine's
all-to-all of heads inside a ring) and ``loongtrain`` (the same with a double ring). They are what speed-ups are
measured against; the same token placements with only the rows that are read are `DcpConfig(placement="zigzag")` and so on.
"""

from hf_dcp.planning.static.bytes import dense_bytes
from hf_dcp.planning.static.layout import SCHEMES, Grid, pad_batch
from hf_dcp.planning.static.plans import StaticPlan, plan_static

__all__ = ["SCHEMES", "Grid", "StaticPlan", "dense_bytes", "pad_batch", "plan_static"]
