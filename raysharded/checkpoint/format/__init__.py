"""The format of a checkpoint, pure: what a manifest says and what must hold, its bytes, and the bytes of data files."""
