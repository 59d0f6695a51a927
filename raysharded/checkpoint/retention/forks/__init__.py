"""Forks: references to a checkpoint of another run, their search, and copies in their place."""
