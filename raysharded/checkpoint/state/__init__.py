"""Sharded state dicts of torch: what each rank holds, who writes and who reads what, and how the ranks agree.

Reading order: `tree` (a nested state as named tensors), `entries`, `optimizers`, `parts` (which cells of a tensor a
rank holds), `coordinator` (how ranks agree without collectives), `merge` (what they must give alike),
`copies`, `spread` (who does what), `staging` (tensors as bytes), `saving`, `pending`, `ending` (what comes of
saves when Python ends), `beside`; `matching` (what belongs to what), `unions`, `sharing`, `reading`, `peers`,
`ties`, `loading`.
"""
