"""Bytes that workers send."""
