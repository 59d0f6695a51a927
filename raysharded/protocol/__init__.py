"""Messages between driver and workers, the session that carries them, and the interface that starts workers."""
