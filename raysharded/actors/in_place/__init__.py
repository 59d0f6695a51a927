"""Python objects of the user's that stay the same in every generation of workers."""
