"""Saves in the background: host copies, pending saves, and the end of the process."""
