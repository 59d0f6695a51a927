"""Checkpoints of other libraries: imported, exported, read and written in their place, compared."""
