"""Checks of what a forward is given, uses, changes and returns, each by name and with the way out."""
