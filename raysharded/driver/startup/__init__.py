"""The start of a driver: alone, after others, or in place of another."""
