"""Sums that do not depend on the number of workers: their order, grids, digests, and the step's consensus."""
