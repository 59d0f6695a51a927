"""Deciding: who is in the run, which generation, who holds what. Pure code; `loop` and `ray_launcher` alone act."""
