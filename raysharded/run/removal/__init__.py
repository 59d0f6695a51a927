"""Removal of a run: what it would do and what prevents it, and its execution."""
