"""raysharded beside what people would use instead: `python -m benchmarks --help`."""
