"""Reading of samples: in a separate process, ahead of their use, and repeatably."""
