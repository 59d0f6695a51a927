"""Who takes part in the next generation, from which state, and in which order. Pure."""
