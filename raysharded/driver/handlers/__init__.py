"""Handlers of what comes from outside: losses, notices, silence, and requests of people."""
