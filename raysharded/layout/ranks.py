"""Which worker becomes which rank: the order that leaves most bytes where they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from raysharded.errors import ConfigError
from raysharded.ids import WorkerId
from raysharded.layout.apart import keep_apart, keep_together
from raysharded.layout.plan import Copy, Target
from raysharded.layout.overlaps import count_wire_bytes
from raysharded.layout.state import StateSpec

_SHIFTS = (0.0, -0.5, 0.5, -1.0, 1.0)
"""Ranks by which survivors are moved; with mirrors a worker holds the rank before its own as well."""


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

    A few orders are tried (survivors near their old places and joiners between them, by id; joiners first or last; a
    rotation) and the one with the fewest bytes on the wire wins, the earlier on a tie. When the number of workers is
    unchanged, the first is that survivors keep their ranks. The order of the arguments' elements does not matter.

    With `nodes` (worker -> node id) each of these is first changed: with mirrors as little as `keep_apart` does, and
    with several replicas so that workers of one node are in one group, as `keep_together` does, which moves no bytes.

    A survivor that is in no copy counts as a joiner. Raises ConfigError when a worker is given twice or nobody is.
    """
    workers = [*survivors, *joiners]
    if not workers or len(set(workers)) != len(workers):
        raise ConfigError(f"order_workers: survivors={survivors}, joiners={joiners}: give each worker once.")
    place = _places(copies)
    new = sorted(w for w in workers if w not in place or w in joiners)
    old = sorted((w for w in workers if w in place and w not in joiners), key=lambda w: (place[w], w))
    if replicas > 1:
        placed = (keep_together(order, nodes or {}, replicas) for order in _orders(old, new, place))
    else:
        apart = nodes if mirrors and nodes is not None else {}
        placed = (keep_apart(order, apart) for order in _orders(old, new, place))
    orders = list(dict.fromkeys(placed))
    targets = [Target(workers=order, mirrors=mirrors, replicas=replicas) for order in orders]
    costs = [count_wire_bytes(spec, copies, target) for target in targets]
    return orders[costs.index(min(costs))]


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
