"""Saving and loading a state that is sharded over ranks."""
