"""Execution of plans with torch: exchange of rows, kernels, the attention operator."""

from hf_dcp.runtime.attention import attention
from hf_dcp.runtime.exchange import ExchangeError
from hf_dcp.runtime.groups import Communicator, Stats, find_communicator
from hf_dcp.runtime.handle import DcpPlan, find_plan

__all__ = ["Communicator", "DcpPlan", "ExchangeError", "Stats", "attention", "find_communicator", "find_plan"]
