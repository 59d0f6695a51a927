"""From a task to a sharded model: what is built, what is compared, and how it lies over the workers."""
