"""Rollback: after a number that is not finite, after wrong results, or by request."""
