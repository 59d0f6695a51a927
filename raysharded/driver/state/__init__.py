"""The driver's state, what it is told and what it commands: frozen values, and pure questions about them."""
