"""All that touches Ray for the driver: workers as actors, nodes, the cluster."""
