"""Sums that are the same at every number of workers: their order, grids, digests, and the step's consensus."""
