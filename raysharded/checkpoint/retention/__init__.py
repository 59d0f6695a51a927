"""Checkpoints of a run: listed, kept or deleted, pinned, forked."""
