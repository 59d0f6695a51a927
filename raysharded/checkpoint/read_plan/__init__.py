"""Who reads what in a load, and who writes what in a save: each byte once. Pure."""
