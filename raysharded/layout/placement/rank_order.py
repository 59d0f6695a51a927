"""Ranks of workers: the order that leaves most bytes where they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from raysharded.errors import ConfigError
from raysharded.ids import WorkerId
from raysharded.layout.placement.assignment import NOWHERE, assign
from raysharded.layout.placement.node_blocks import in_blocks
from raysharded.layout.placement.node_spread import keep_apart, place_together, swap_apart
from raysharded.layout.placement.overlaps import Overlaps, find_gains, find_overlaps
from raysharded.layout.reshard.plan import Copy, Target
from raysharded.layout.reshard.segments import layout_of
from raysharded.layout.state import StateSpec

_SHIFTS = (0.0, -0.5, 0.5, -1.0, 1.0)
"""Ranks by which survivors are moved; with mirrors a worker also holds the rank before its own."""
_MAX_LOOKS = 8_000_000
"""Limit of a search: a few seconds, for thousands of workers whose every shard has moved."""


def order_workers(
    spec: StateSpec,
    copies: Sequence[Copy],
    survivors: Sequence[WorkerId],
    joiners: Sequence[WorkerId],
    mirrors: bool,
    nodes: Mapping[WorkerId, str] | None = None,
    replicas: int = 1,
    tensor: int = 1,
    apart: int = 1,
) -> tuple[WorkerId, ...]:
    """The new ranks of `survivors` and `joiners`, in order, for a `Target` with these `mirrors` and `replicas`.

    No order has fewer bytes on the wire. A place is worth the bytes of it that the worker has, regardless of the other
    workers. So this is an assignment problem, which `assign` solves. On a tie a simple order wins, the earlier of
    several: survivors near their old places and joiners between them, by id; joiners first or last; a rotation. If the
    number of workers is unchanged, the first of these keeps the survivors' ranks. The order of the arguments' elements
    does not matter. If the search takes more than `_MAX_LOOKS`, the best simple order is taken.

    With `nodes` (worker -> node id) each order is changed first:

    - With mirrors, neighbours are put on different nodes wherever possible, by exchanges of two, else by `keep_apart`.
      The result need not be the best of all such orders.
    - With several replicas, workers of one node are put in one group, as by `keep_together`, which moves no bytes. The
      order with the fewest groups apart wins first: bytes are moved once, and groups communicate in every step.
    - With a tensor parallel degree of `tensor`, as many tensor parallel groups as possible are within a node, before
      all else.
    - With `apart` above 1 and one replica, all workers of a node follow each other, as the caller chose (see
      `in_blocks`).

    A survivor that is in no copy counts as a joiner. Raises ConfigError if a worker is given twice or none is given,
    and for workers that cannot be such a mesh.
    """
    workers = [*survivors, *joiners]
    if not workers or len(set(workers)) != len(workers):
        raise ConfigError(f"order_workers: survivors={survivors}, joiners={joiners}: give each worker once.")
    target = Target(workers=tuple(workers), mirrors=mirrors, replicas=replicas, tensor=tensor, apart=apart)
    shards = target.mesh.shards
    place = _places(copies)
    holders = sorted((w for w in workers if w in place), key=lambda w: (place[w], w))
    joining = {*joiners, *(w for w in workers if w not in place)}
    old = [w for w in holders if w not in joining]
    new = sorted(joining) if old else _group_by_group(sorted(joining), shards)
    overlaps = find_overlaps(spec, copies, layout_of(target.mesh))
    kept_apart = apart if mirrors and replicas == 1 and shards > 1 else None
    gains = find_gains(overlaps, workers, kept_apart)
    number = {worker: i for i, worker in enumerate(workers)}
    shard = np.repeat(np.arange(shards), replicas)

    def kept(order: Sequence[WorkerId]) -> int:
        return int(gains.of(np.array([number[worker] for worker in order]), shard).sum())

    orders = [*_orders(old, new, place), *_best(overlaps, holders, workers, replicas, kept_apart)]
    best = max(orders, key=kept)
    runs = replicas == 1 and apart > 1
    if nodes and (tensor > 1 or runs):
        by_worth = sorted(orders, key=kept, reverse=True)
        return in_blocks(by_worth, nodes, workers, gains, target.mesh, runs=runs, max_looks=_MAX_LOOKS)
    if kept_apart and nodes:
        best = max((keep_apart(order, nodes) for order in (*orders, swap_apart(best, nodes, workers, gains))), key=kept)
    return place_together(sorted(orders, key=kept, reverse=True), nodes or {}, replicas) if replicas > 1 else best


def _best(
    overlaps: Overlaps, holders: Sequence[WorkerId], workers: Sequence[WorkerId], replicas: int, apart: int | None
) -> Iterator[tuple[WorkerId, ...]]:
    """The order that keeps most in place, if it is found; workers with nothing to keep fill the gaps, by id."""
    shards = len(overlaps.in_memory)
    places = assign(find_gains(overlaps, holders, apart).by_worker(len(holders)), [replicas] * shards, _MAX_LOOKS)
    if places is None:
        return
    at: list[list[WorkerId]] = [[] for _ in range(shards)]
    for worker, shard in zip(holders, places, strict=True):
        if shard != NOWHERE:
            at[shard].append(worker)
    rest = iter(sorted({*workers}.difference(*at)))
    yield tuple(worker for here in at for worker in (*here, *(next(rest) for _ in range(replicas - len(here)))))


def _orders(
    old: Sequence[WorkerId], new: Sequence[WorkerId], place: dict[WorkerId, float]
) -> Iterator[tuple[WorkerId, ...]]:
    """Simple orders by place on the line; with several replicas: all holders of the first shard, then of the second."""
    for shift in _SHIFTS:
        yield _spread(old, new, place, shift)
    for order in ((*old, *new), (*new, *old)):
        for turn in (0, 1, -1):
            yield order[turn:] + order[:turn]


def _group_by_group(workers: Sequence[WorkerId], shards: int) -> list[WorkerId]:
    """Shard by shard, in the order in which each replica's workers follow each other by id."""
    return [worker for shard in range(shards) for worker in workers[shard::shards]]


def _places(copies: Sequence[Copy]) -> dict[WorkerId, float]:
    """Place of each worker on the line (0 to 1): the middle of its old rank, by the first copy it is in."""
    place: dict[WorkerId, float] = {}
    for medium, shift in (("snapshot", 0), ("mirror", 1)):  # the mirror holder of a rank is the next rank
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
