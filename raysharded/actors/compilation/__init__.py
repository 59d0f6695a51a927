"""Compiled blocks whose bits do not depend on when, and for which shapes, a worker compiled them."""
