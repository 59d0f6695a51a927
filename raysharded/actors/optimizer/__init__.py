"""The task's optimizer over local shards: its trial before a run, its hooks and its state."""
