"""What is seen of a run: its events, metrics and log lines."""
