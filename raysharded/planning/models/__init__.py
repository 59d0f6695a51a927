"""The planner's view of models."""
