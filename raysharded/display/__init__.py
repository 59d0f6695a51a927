"""Text for people: quantities in words, text of strangers made harmless, errors without our own lines."""
