"""Leadership over a run: a fencing number, and the lease that shows it."""
