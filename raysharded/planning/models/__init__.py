"""Models as the planner sees them."""
