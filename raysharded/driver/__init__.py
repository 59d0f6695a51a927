"""Deciding: who is in the run, which generation, who holds what. Pure code; `loop` and `launcher` alone act."""
