"""How samples are read: in a process of their own, ahead of their use, the same at every reading."""
