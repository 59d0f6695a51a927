"""Commands on runs: list them, look at one, watch it, change it."""
