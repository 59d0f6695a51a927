"""raysharded compared with its alternatives: `python -m benchmarks --help`."""
