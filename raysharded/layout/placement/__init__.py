"""Ranks for workers: few bytes move, and shards are apart from their mirrors."""
