"""Planning ahead: who plans which batch, and how plans get to the other ranks.

Importing this package does not import torch; `hf_dcp.lookahead.planning` and `hf_dcp.lookahead.batch_plan` do.
"""
