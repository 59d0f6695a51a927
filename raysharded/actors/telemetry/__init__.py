"""What a worker is doing, seen from other threads: phases, time at work, stacks."""
