"""One training step, from its samples to its report, and the checks that prove it."""
