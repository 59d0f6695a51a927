"""Background saves: host copies, pending saves, and waiting for them at process exit."""
