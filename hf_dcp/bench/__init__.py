"""Measuring attention under different plans, side by side: what `hf-dcp bench attention` does."""
