"""Bytes of one worker, by kind and moment."""
