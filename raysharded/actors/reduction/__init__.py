"""Exchange of gradients between workers, and their addition in the one canonical order."""
