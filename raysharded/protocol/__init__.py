"""Messages between driver and workers, the session that carries them, and the seam that starts workers."""
