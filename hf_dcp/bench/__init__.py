"""Measurements: plans, attention, kernels, rates: what `hf-dcp bench` does. Nothing of `planner*` or `batches` needs torch."""
