"""Placement: which device owns each token block, and which computes each tile."""

from hf_dcp.planning.placement.auto import Layout, choose_layout
from hf_dcp.planning.placement.portfolio import Solution, place, solve
from hf_dcp.planning.problem import Placement

__all__ = ["Layout", "Placement", "Solution", "choose_layout", "place", "solve"]
