"""The checkpoint format: the manifest, its invariants and its bytes, and the bytes of data files. Pure."""
