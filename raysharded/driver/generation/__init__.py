"""Generations: formed, prepared, paused, ended; and the steps that they report."""
