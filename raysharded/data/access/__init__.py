"""Reading of samples: in a process of its own, ahead of their use, the same at every reading."""
