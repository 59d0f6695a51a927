"""Gradients on their way to the shards that they belong to, added in the one canonical order."""
