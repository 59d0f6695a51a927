"""Mixtures: named sources with weights, and the source and the sample at every position."""
