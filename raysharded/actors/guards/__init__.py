"""Checks of a forward's inputs, parameters and outputs; each error names the cause and a remedy."""
