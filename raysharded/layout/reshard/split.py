"""Division of bytes between several senders that have them, at few places."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raysharded.layout.sharding import ALIGNMENT

MIN_PIECE_BYTES = 64 * 1024
"""Least distance of a cut from the ends of one tensor's bytes that a receiver needs."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stripes:
    """`count` tensors of `nbytes` bytes each that are needed from byte `start` on; one stripe per entry."""

    start: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    count: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Parts:
    """Parts of stripes.

    Of stripe `stripe[i]` the tensors `first[i] .. behind[i]` (behind excluded), of each the `nbytes[i]` bytes from
    `start[i]` on, are for option `option[i]`.
    """

    stripe: NDArray[np.int64]
    option: NDArray[np.int64]
    first: NDArray[np.int64]
    behind: NDArray[np.int64]
    start: NDArray[np.int64]
    nbytes: NDArray[np.int64]


def split(stripes: Stripes, shares: NDArray[np.int64]) -> Parts:
    """Divide the stripes, laid end to end, into consecutive runs of the lengths `shares` (groups, options).

    The runs of a group cover whole stripes together. A run ends at the nearby end of a tensor's bytes, or at a multiple
    of `ALIGNMENT`. The multiple is `MIN_PIECE_BYTES` or more from both ends of those bytes, and never within an
    element.

    Laws: the parts cover each byte of each tensor of each stripe once; an option's run is `MIN_PIECE_BYTES` off its
    share at each end, at most.
    """
    size = stripes.nbytes * stripes.count
    begin = np.cumsum(size) - size
    ends = np.cumsum(shares.ravel())
    runs = ends - shares.ravel()
    inner = runs < (ends[-1] if len(ends) else 0)
    snapped, around = _snapped(stripes, begin, runs[inner])
    runs[inner] = snapped
    edges = np.unique(np.concatenate([begin, snapped, around, begin[-1:] + size[-1:]]))
    at, length = edges[:-1], np.diff(edges)
    stripe = np.searchsorted(begin, at, side="right") - 1
    first, within = np.divmod(at - begin[stripe], stripes.nbytes[stripe])
    behind = first + np.maximum(length // stripes.nbytes[stripe], 1)
    return Parts(
        stripe=stripe,
        option=(np.searchsorted(runs, at, side="right") - 1) % max(shares.shape[1], 1),
        first=first,
        behind=behind,
        start=stripes.start[stripe] + within,
        nbytes=length // (behind - first),
    )


def _snapped(
    stripes: Stripes, begin: NDArray[np.int64], cuts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Adjusted cuts, and both ends of the tensors that are cut within."""
    stripe = np.searchsorted(begin, cuts, side="right") - 1
    whole, start = stripes.nbytes[stripe], stripes.start[stripe]
    tensor, within = np.divmod(cuts - begin[stripe], whole)
    aligned = (start + within + ALIGNMENT // 2) // ALIGNMENT * ALIGNMENT - start
    small = (aligned < MIN_PIECE_BYTES) | (whole - aligned < MIN_PIECE_BYTES)
    aligned = np.where(small, np.where(within * 2 < whole, 0, whole), aligned)
    base = begin[stripe] + tensor * whole
    cut_within = (aligned > 0) & (aligned < whole)
    return base + aligned, np.concatenate([base[cut_within], (base + whole)[cut_within]])
