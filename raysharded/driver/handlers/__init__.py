"""Handlers of events from outside: losses, notices, silence, and user requests."""
