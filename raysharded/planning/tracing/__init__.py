"""The tensors that a microbatch and an optimizer step keep alive, found without a device."""
