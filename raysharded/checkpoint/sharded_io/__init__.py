"""Saving and loading of a state that is sharded over ranks."""
