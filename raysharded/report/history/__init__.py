"""A journal folded: steps, incidents, times, checkpoints of a whole run."""
