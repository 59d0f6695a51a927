"""What makes sums the same at every number of workers: orders, grids, digests, the step's agreement."""
