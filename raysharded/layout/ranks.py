"""Which worker becomes which rank: the order that leaves most bytes where they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from raysharded.errors import ConfigError
from raysharded.ids import WorkerId
from raysharded.layout.apart import keep_apart, keep_together
from raysharded.layout.assignment import NOWHERE, assign
from raysharded.layout.overlaps import Overlaps, find_overlaps, places_of
from raysharded.layout.plan import Copy, Target
from raysharded.layout.state import StateSpec

_SHIFTS = (0.0, -0.5, 0.5, -1.0, 1.0)
"""Ranks by which survivors are moved; with mirrors a worker holds the rank before its own as well."""
_MAX_LOOKS = 10_000_000
"""A few seconds, for thousands of workers whose every shard has moved."""


def order_workers(
    spec: StateSpec,
    copies: Sequence[Copy],
    survivors: Sequence[WorkerId],
    joiners: Sequence[WorkerId],
    mirrors: bool,
    nodes: Mapping[WorkerId, str] | None = None,
    replicas: int = 1,
) -> tuple[WorkerId, ...]:
    """The new ranks of `survivors` and `joiners`, in order, for a `Target` with these `mirrors` and `replicas`.

    It is the order with the fewest bytes on the wire of all there are: each worker's place is worth the bytes of it that
    the worker has, whoever is at the others, so this is an assignment problem, which `assign` solves. On a tie a simple
    order wins (survivors near their old places and joiners between them, by id; joiners first or last; a rotation), the
    earlier of several. When the number of workers is unchanged, the first is that survivors keep their ranks. The order
    of the arguments' elements does not matter. Should the search take more than `_MAX_LOOKS`, the best of the simple
    ones is taken.

    With `nodes` (worker -> node id) each order is first changed: with mirrors as little as `keep_apart` does, after which
    it need not be the best of all such orders, and with several replicas so that workers of one node are in one group,
    as `keep_together` does, which moves no bytes.

    A survivor that is in no copy counts as a joiner. Raises ConfigError when a worker is given twice or nobody is.
    """
    workers = [*survivors, *joiners]
    if not workers or len(set(workers)) != len(workers):
        raise ConfigError(f"order_workers: survivors={survivors}, joiners={joiners}: give each worker once.")
    shards = Target(workers=tuple(workers), mirrors=mirrors, replicas=replicas).mesh.shards
    place = _places(copies)
    new = sorted(w for w in workers if w not in place or w in joiners)
    old = sorted((w for w in workers if w in place and w not in joiners), key=lambda w: (place[w], w))
    overlaps = find_overlaps(spec, copies, shards)
    both = mirrors and replicas == 1 and shards > 1
    orders = [*_orders(old, new, place), *_best(overlaps, old, new, replicas, both)]
    if mirrors and nodes and replicas == 1:
        orders = [keep_apart(order, nodes) for order in orders]
    orders = list(dict.fromkeys(orders))
    gains = _gains(overlaps, workers, both)
    kept = [_kept(gains, workers, order, replicas) for order in orders]
    order = orders[kept.index(max(kept))]
    return keep_together(order, nodes or {}, replicas) if replicas > 1 else order


def _best(
    overlaps: Overlaps, old: Sequence[WorkerId], new: Sequence[WorkerId], replicas: int, both: bool
) -> Iterator[tuple[WorkerId, ...]]:
    """The order that keeps most where it is; who has nothing to keep fills the gaps, by id."""
    shards = len(overlaps.in_memory)
    gains: list[list[tuple[int, int]]] = [[] for _ in old]
    found = _gains(overlaps, old, both)
    for worker, shard, nbytes in zip(*(column.tolist() for column in found), strict=True):
        gains[worker].append((shard, nbytes))
    places = assign(gains, [replicas] * shards, _MAX_LOOKS)
    if places is None:
        return
    at: list[list[WorkerId]] = [[] for _ in range(shards)]
    for worker, shard in zip(old, places, strict=True):
        if shard != NOWHERE:
            at[shard].append(worker)
    rest = iter(sorted([*new, *(w for w, shard in zip(old, places, strict=True) if shard == NOWHERE)]))
    yield tuple(
        worker for here in at for worker in (*here, *(next(rest) for _ in range(replicas - len(here))))
    )


def _gains(
    overlaps: Overlaps, workers: Sequence[WorkerId], both: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(index of a worker, shard, bytes that it need not get if it is there); `both`: there it also keeps a mirror of the
    shard before."""
    shards = len(overlaps.in_memory)
    index = places_of(overlaps, workers)
    rows = np.flatnonzero(index >= 0)
    index, shard, nbytes = index[rows], overlaps.shard[rows], overlaps.nbytes[rows]
    if both:
        index, nbytes = np.tile(index, 2), np.tile(nbytes, 2)
        shard = np.concatenate([shard, (shard + 1) % shards])
    key, where = np.unique(index * shards + shard, return_inverse=True)
    return key // shards, key % shards, np.bincount(where, nbytes, len(key)).astype(np.int64)


def _kept(
    gains: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    workers: Sequence[WorkerId],
    order: Sequence[WorkerId],
    replicas: int,
) -> int:
    """The bytes that need not go over the wire; `order` is by shard."""
    worker, shard, nbytes = gains
    at = {worker: number // replicas for number, worker in enumerate(order)}
    there = np.array([at[worker] for worker in workers], np.int64)
    return int(nbytes[there[worker] == shard].sum())


def _orders(
    old: Sequence[WorkerId], new: Sequence[WorkerId], place: dict[WorkerId, float]
) -> Iterator[tuple[WorkerId, ...]]:
    """By place on the line; with several replicas: all holders of the first shard, then of the second."""
    for shift in _SHIFTS:
        yield _spread(old, new, place, shift)
    for order in ((*old, *new), (*new, *old)):
        for turn in (0, 1, -1):
            yield order[turn:] + order[:turn]


def _places(copies: Sequence[Copy]) -> dict[WorkerId, float]:
    """Where on the line (0 to 1) the middle of each worker's old rank is, by the first copy it is in."""
    place: dict[WorkerId, float] = {}
    for medium, shift in (("snapshot", 0), ("mirror", 1)):  # who keeps a mirror of a rank is the rank behind it
        for copy in copies:
            if copy.medium == medium:
                for rank, holder in enumerate(copy.holders):
                    if holder is not None:
                        place.setdefault(holder, ((rank + shift) % copy.world_size + 0.5) / copy.world_size)
    return place


def _spread(
    old: Sequence[WorkerId], new: Sequence[WorkerId], place: dict[WorkerId, float], shift: float
) -> tuple[WorkerId, ...]:
    """Survivors in order at the ranks nearest to their places, joiners at the others."""
    world_size = len(old) + len(new)
    slots: list[WorkerId | None] = [None] * world_size
    free = 0
    for i, worker in enumerate(old):
        wanted = round(place[worker] * world_size - 0.5 + shift)
        slot = min(max(wanted, free), world_size - (len(old) - i))
        slots[slot] = worker
        free = slot + 1
    rest = iter(new)
    return tuple(next(rest) if worker is None else worker for worker in slots)
