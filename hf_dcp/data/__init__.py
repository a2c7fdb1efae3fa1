"""Data: whole batches of a DCP group, and what of them each rank gets."""
