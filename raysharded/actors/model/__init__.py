"""The model: built from the task, compared between workers, and cut into shards."""
