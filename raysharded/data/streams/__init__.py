"""Sources that are read one item after the other, or by shard and item."""
