"""The driver's state, events and commands: frozen values, and pure questions about them."""
