"""A folded journal: steps, incidents, times, checkpoints of a whole run."""
