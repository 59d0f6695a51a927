"""States as the ranks pass them: trees, tensors and boxes, optimizers, and values that must be equal."""
