"""Cache-sized blocks of a gradient, and rows folded half onto half before `grad_norm` reads them."""

from __future__ import annotations

BLOCK = {False: 1 << 16, True: 1 << 22}
"""Elements at a time, on a CPU (they stay in its cache) and on a GPU (few synchronisations)."""
SMALL = 4
"""What is shorter than the fourth part of a block is gathered until it is as long."""
_MOST_FOLDS = 4  # then what is left is a sixteenth
_LONGEST_ROW = 1 << 12


def row_length(row_numel: int) -> int:
    """How many elements, one after the other, are always on one worker: a row or a part of one; not too many."""
    length = row_numel
    while length > _LONGEST_ROW and length % 2 == 0:
        length //= 2
    return length if 0 < length <= _LONGEST_ROW else 1


def num_folds(length: int) -> int:
    """How often so long a row can be folded, at most four times."""
    twos = (length & -length).bit_length() - 1
    return min(twos, _MOST_FOLDS)
