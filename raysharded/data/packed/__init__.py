"""Documents packed to the length of a sequence."""
