"""Live tensors of a microbatch and of an optimizer step, measured without a device."""
