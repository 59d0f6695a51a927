"""The state in memory: on the device, in host memory, in peers' memory, and in transfer between these."""
