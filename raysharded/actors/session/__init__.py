"""A training loop that belongs to the user: the function runs in the thread that computes, and serves the driver."""
