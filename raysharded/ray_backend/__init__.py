"""Ray for the driver: workers as actors, nodes, the cluster."""
