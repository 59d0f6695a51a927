"""Cache-sized blocks in which a gradient or a digest is computed, and rows that `grad_norm` folds half onto half."""

from __future__ import annotations

BLOCK = {False: 1 << 16, True: 1 << 22}
"""Elements in a block, on a CPU (they stay in its cache) and on a GPU (few synchronisations)."""
DIGEST_BLOCK = {False: 1 << 15, True: 1 << 21}
"""Elements of which `bit_digest` computes digests at once, which do not depend on it."""
DIGEST_BYTES = 24
"""Memory that a digest takes for each element of a block: three int64."""
SMALL = 4
"""Tensors shorter than a quarter of a block are joined until they reach that length."""
_MOST_FOLDS = 4  # leaves a sixteenth
_LONGEST_ROW = 1 << 12


def row_length(row_numel: int) -> int:
    """Number of consecutive elements that are always on one worker: a row or a part of one, at most 4096."""
    length = row_numel
    while length > _LONGEST_ROW and length % 2 == 0:
        length //= 2
    return length if 0 < length <= _LONGEST_ROW else 1


def num_folds(length: int) -> int:
    """Number of folds of a row of this length, at most four."""
    twos = (length & -length).bit_length() - 1
    return min(twos, _MOST_FOLDS)
