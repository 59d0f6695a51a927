"""The beginning of a driver: alone, after others, or in another's place."""
