"""Process groups of one generation, waits on them that can be aborted, and torch's meshes over them."""
