"""Process groups of one generation, abortable waits on them, and torch's meshes over them."""
