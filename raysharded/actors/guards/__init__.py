"""Checks of a forward: its inputs, the parameters it uses, its outputs; each names the culprit and the way out."""
