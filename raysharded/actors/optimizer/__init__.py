"""The task's optimizer over local shards: tried before a run depends on it, its state kept and replaced."""
