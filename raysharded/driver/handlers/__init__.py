"""Handlers of events from outside: losses, notices, silence, and requests of people."""
