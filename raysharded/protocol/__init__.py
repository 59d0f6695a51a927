"""What driver and workers say to each other, and what starts workers."""
