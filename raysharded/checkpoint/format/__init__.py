"""The format of a checkpoint, pure: the manifest, its invariants and its bytes, and the bytes of data files."""
