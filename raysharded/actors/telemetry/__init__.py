"""A worker's activity, observed from other threads: phases, time at work, stacks."""
