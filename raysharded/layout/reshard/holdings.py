"""Holders of all bytes in memory: the workers that hold the copies, by the cut of the state that they lie in.

Copies of one layout are cut alike in any medium, so they are one family. A part of it is held by all the workers that
any of its copies names for a rank that has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raysharded.ids import WorkerId
from raysharded.layout.reshard.plan import Copy
from raysharded.layout.reshard.segments import Layout

NOBODY = -1
"""In `Family.holder` and `Family.held`: lost, or no further part."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Family:
    """The copies in memory of one layout. Workers are numbered as in `Holdings.workers`.

    There is a column per copy and tensor rank; those of a copy follow each other, by tensor rank. Parts that one rank
    alone has are in the first of them.
    """

    layout: Layout
    row: int
    """Row of `Segments.owner` for this layout: the part that each segment is in."""
    copy: NDArray[np.int64]
    """(columns,): index of the copy among all copies, ascending."""
    holder: NDArray[np.int64]
    """(parts, columns): a worker; `NOBODY` if the part is lost, or if the worker has it by an earlier column."""
    held: NDArray[np.int64]
    """(workers + 1, most parts of one): the parts that each worker has; `NOBODY` for no more. The last row is that of
    `NOBODY`, without parts."""
    held_by: NDArray[np.int64]
    """For each entry of `held`: the first of all copies by which the worker has that part."""
    held_as: NDArray[np.int64]
    """For each entry of `held`: the rank in that copy."""

    def rank_of(self, part: NDArray[np.int64], column: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rank by which the worker in `holder[part, column]` has the part."""
        return self.layout.rank_of(part, column % self.layout.tensor)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Holdings:
    """Families of copies, by the first of their copies."""

    workers: NDArray[np.int64]
    """Ids of all holders, ascending."""
    families: tuple[Family, ...]

    def numbers(self, ids: Sequence[WorkerId] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Number of each worker by its id; `NOBODY` for one that has nothing."""
        wanted = np.asarray(ids, np.int64)
        if len(self.workers) == 0:
            return np.full(len(wanted), NOBODY, np.int64)
        near = np.minimum(np.searchsorted(self.workers, wanted), len(self.workers) - 1)
        return np.where(self.workers[near] == wanted, near, NOBODY)


def holdings_of(copies: Sequence[Copy], layouts: Sequence[Layout], layout_index: Sequence[int]) -> Holdings:
    """Holders of all copies except those in storage; copy `c` is laid out as `layouts[layout_index[c]]`."""
    columns = {c: _column(copy) for c, copy in enumerate(copies) if copy.medium != "storage"}
    everyone = np.unique(np.concatenate([np.zeros(0, np.int64), *columns.values()]))
    workers = everyone[everyone >= 0]
    families = []
    for row in dict.fromkeys(layout_index[c] for c in columns):
        of_family = [c for c in columns if layout_index[c] == row]
        ids = np.stack([columns[c] for c in of_family], axis=1)
        holder = np.where(ids >= 0, np.searchsorted(workers, ids), NOBODY)
        families.append(_family(layouts[row], row, np.array(of_family, np.int64), holder, len(workers)))
    return Holdings(workers=workers, families=tuple(families))


def without_repeats(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows, with `NOBODY` for each number after its first occurrence in a row."""
    order = np.argsort(rows, axis=1, kind="stable")
    ordered = np.take_along_axis(rows, order, axis=1)
    repeated = np.zeros(rows.shape, np.bool_)
    np.put_along_axis(repeated, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
    return np.where(repeated, NOBODY, rows)


def _family(layout: Layout, row: int, copy: NDArray[np.int64], by_rank: NDArray[np.int64], num_workers: int) -> Family:
    """The family of a layout. `by_rank`: (ranks, copies), the workers."""
    copy = np.repeat(copy, layout.tensor)
    holder = without_repeats(by_rank if layout.tensor == 1 else _by_part(layout, by_rank))
    part, column = np.nonzero(holder != NOBODY)
    worker = holder[part, column]
    order = np.argsort(worker, kind="stable")
    part, column, worker = part[order], column[order], worker[order]
    count = np.bincount(worker, minlength=num_workers)
    nth = np.arange(len(worker)) - np.repeat(np.cumsum(count) - count, count)
    held = np.full((num_workers + 1, int(count.max(initial=0))), NOBODY, np.int64)
    held_by, held_as = held.copy(), held.copy()
    held[worker, nth], held_by[worker, nth] = part, copy[column]
    held_as[worker, nth] = layout.rank_of(part, column % layout.tensor)
    return Family(layout=layout, row=row, copy=copy, holder=holder, held=held, held_by=held_by, held_as=held_as)


def _by_part(layout: Layout, by_rank: NDArray[np.int64]) -> NDArray[np.int64]:
    """(parts, copies * tensor ranks): the workers."""
    alone = np.full((*by_rank.shape, layout.tensor), NOBODY, np.int64)
    alone[:, :, 0] = by_rank
    common = by_rank.reshape(-1, layout.tensor, by_rank.shape[1]).transpose(0, 2, 1)
    return np.concatenate([alone.reshape(len(alone), -1), common.reshape(len(common), -1)])


def _column(copy: Copy) -> NDArray[np.int64]:
    return np.array([NOBODY if holder is None else holder for holder in copy.holders], np.int64)
