"""Loops of other frameworks in a session. Each module needs its framework, which nothing else of raysharded imports."""
