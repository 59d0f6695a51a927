"""Who has which bytes in memory: the holders of the copies, by the cut of the state that they lie in.

Copies of one world size are cut alike, whatever their medium, so they are one *family*: a rank of it is held by all the
workers that any of its copies names for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raysharded.ids import WorkerId
from raysharded.layout.plan import Copy

NOBODY = -1
"""In `Family.holder` and `Family.held`: lost, or fewer than others."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Family:
    """The copies in memory of one world size. Workers are numbered as in `Holdings.workers`."""

    size: int
    """The row of `Segments.owner` that says which rank a segment belongs to."""
    copy: NDArray[np.int64]
    """The places of the family's copies among all copies, ascending."""
    holder: NDArray[np.int64]
    """(ranks, copies): a worker; `NOBODY` if that is lost, or if the worker has the rank by an earlier copy."""
    held: NDArray[np.int64]
    """(workers + 1, most ranks that one has): the ranks that each worker has; `NOBODY` for no more. The last row is
    that of `NOBODY`, who has none."""
    held_by: NDArray[np.int64]
    """As `held`: the first of all copies by which it has that rank."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Holdings:
    """The families of some copies, by the first of their copies."""

    workers: NDArray[np.int64]
    """The ids of all holders, ascending."""
    families: tuple[Family, ...]

    def numbers(self, ids: Sequence[WorkerId] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Per id the number of the worker; `NOBODY` for one that has nothing."""
        wanted = np.asarray(ids, np.int64)
        if len(self.workers) == 0:
            return np.full(len(wanted), NOBODY, np.int64)
        near = np.minimum(np.searchsorted(self.workers, wanted), len(self.workers) - 1)
        return np.where(self.workers[near] == wanted, near, NOBODY)


def holdings_of(copies: Sequence[Copy], size_index: Sequence[int]) -> Holdings:
    """The holders of all copies but those in storage; `size_index[c]` is the `Family.size` of copy `c`."""
    columns = {c: _column(copy) for c, copy in enumerate(copies) if copy.medium != "storage"}
    everyone = np.unique(np.concatenate([np.zeros(0, np.int64), *columns.values()]))
    workers = everyone[everyone >= 0]
    families = []
    for size in dict.fromkeys(size_index[c] for c in columns):
        of_family = [c for c in columns if size_index[c] == size]
        ids = np.stack([columns[c] for c in of_family], axis=1)
        holder = np.where(ids >= 0, np.searchsorted(workers, ids), NOBODY)
        families.append(_family(size, np.array(of_family, np.int64), holder, len(workers)))
    return Holdings(workers=workers, families=tuple(families))


def without_repeats(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same rows, each number but its first occurrence in a row replaced by `NOBODY`."""
    order = np.argsort(rows, axis=1, kind="stable")
    ordered = np.take_along_axis(rows, order, axis=1)
    repeated = np.zeros(rows.shape, np.bool_)
    np.put_along_axis(repeated, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
    return np.where(repeated, NOBODY, rows)


def _family(size: int, copy: NDArray[np.int64], holder: NDArray[np.int64], num_workers: int) -> Family:
    holder = without_repeats(holder)
    rank, column = np.nonzero(holder != NOBODY)
    worker = holder[rank, column]
    order = np.argsort(worker, kind="stable")
    rank, column, worker = rank[order], column[order], worker[order]
    count = np.bincount(worker, minlength=num_workers)
    nth = np.arange(len(worker)) - np.repeat(np.cumsum(count) - count, count)
    held = np.full((num_workers + 1, int(count.max(initial=0))), NOBODY, np.int64)
    held_by = held.copy()
    held[worker, nth], held_by[worker, nth] = rank, copy[column]
    return Family(size=size, copy=copy, holder=holder, held=held, held_by=held_by)


def _column(copy: Copy) -> NDArray[np.int64]:
    return np.array([NOBODY if holder is None else holder for holder in copy.holders], np.int64)
