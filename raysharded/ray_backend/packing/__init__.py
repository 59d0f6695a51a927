"""Packing of text on a Ray cluster."""
