"""Which worker gets which rank: few bytes move, and shards are apart from their mirrors."""
