"""Which checkpoints a run has, which stay, and how the rest goes. Reading order: `history` (claims, from the newest
back), `catalog` (what is there), `policy` (what stays; pure), `pins`, `retiring`, `debris`, `fork`, `pruning`."""
