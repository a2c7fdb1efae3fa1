"""Planning: a batch in, one small plan per rank out. Nothing here knows torch."""

from hf_dcp.planning.batch import BatchSpec, ModelShape, RowBytes, Topology
from hf_dcp.planning.plan import RankPlan
from hf_dcp.planning.planner import Plan, plan_batch

__all__ = ["BatchSpec", "ModelShape", "Plan", "RankPlan", "RowBytes", "Topology", "plan_batch"]
