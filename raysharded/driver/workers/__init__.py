"""Workers that come, fail and go."""
