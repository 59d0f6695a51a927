"""Which checkpoints there are, which stay, and what is deleted."""
