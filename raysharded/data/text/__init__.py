"""Text, documents and token files."""
