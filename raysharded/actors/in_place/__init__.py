"""The user's modules stay the same objects: FSDP2 wraps others in their place."""
