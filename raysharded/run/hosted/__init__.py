"""Runs that an actor of their own drives."""
