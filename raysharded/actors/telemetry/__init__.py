"""A worker's activity, seen from other threads: phases, time at work, stacks."""
