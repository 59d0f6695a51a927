"""Forks of checkpoints: how one begins, the search for those of a checkpoint, and copies that need no parent."""
