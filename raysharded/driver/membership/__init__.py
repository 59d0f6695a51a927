"""The next generation's members, their order, and the state that they begin with. Pure."""
