"""What a state is: its tree, its tensors and boxes, its optimizers, and which of its values must be equal."""
