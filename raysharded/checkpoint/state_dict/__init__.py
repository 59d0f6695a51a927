"""A state as ranks give it: its tree, tensors and boxes, optimizers, and values that must be equal."""
