"""The driver's state, events and commands: frozen values, and pure functions of them."""
