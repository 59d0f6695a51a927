"""Who drives a run: leadership with a fencing number, and the lease that shows it."""
