"""The newest complete step: the newest one of which every byte is still in somebody's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from raysharded.errors import ConfigError
from raysharded.ids import WorkerId
from raysharded.layout.plan import Copy
from raysharded.layout.segments import cut
from raysharded.layout.sharding import require_rank
from raysharded.layout.state import StateSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """One buffer that a live worker holds complete: of rank `rank` of `world_size`, as it was after `step`.

    `layout_id` tells layouts apart (a generation's id does); one `layout_id` has one world size.
    """

    worker: WorkerId
    step: int
    medium: Literal["snapshot", "mirror"]
    world_size: int
    rank: int
    layout_id: int

    def __post_init__(self) -> None:
        require_rank(self.world_size, self.rank)


def recoverable(spec: StateSpec, held: Sequence[Held]) -> tuple[int, tuple[Copy, ...]] | None:
    """The newest step all of whose bytes are held, with its copies for the planner; None if there is none.

    The bytes may be in several layouts and media. The copies come by newest layout, snapshots before mirrors; when
    several workers hold the same buffer there is a copy for each. The order of `held` does not matter.
    """
    by_step: dict[int, list[Held]] = {}
    for one in held:
        by_step.setdefault(one.step, []).append(one)
    for step in sorted(by_step, reverse=True):
        copies = _copies(by_step[step])
        if is_complete(spec, copies):
            return step, copies
    return None


def is_complete(spec: StateSpec, copies: Sequence[Copy]) -> bool:
    """Whether every byte of the state is in at least one of the copies.

    Law: equals "the planner finds nothing missing", for any target.
    """
    if not copies:
        return spec.total_bytes == 0
    segments = cut(spec, [copy.world_size for copy in copies])
    n = segments.first_replicated
    covered = np.zeros(len(segments.cls), np.bool_)
    for c, copy in enumerate(copies):
        if copy.medium == "storage":
            return True
        available = np.array([holder is not None for holder in copy.holders])
        covered[:n] |= available[segments.owner[c, :n]]
        covered[n:] |= available.any()
    return bool(covered.all())


def _copies(held: Sequence[Held]) -> tuple[Copy, ...]:
    sizes: dict[int, int] = {}
    holders: dict[tuple[int, int, int], list[WorkerId | None]] = {}
    ordered = sorted(set(held), key=lambda h: (-h.layout_id, h.medium == "mirror", h.rank, h.worker))
    for one in ordered:
        if sizes.setdefault(one.layout_id, one.world_size) != one.world_size:
            raise ConfigError(
                f"recoverable: layout {one.layout_id} is reported with world sizes {sizes[one.layout_id]} and "
                f"{one.world_size}; give every layout an id of its own."
            )
        replica = 0
        key = (-one.layout_id, int(one.medium == "mirror"), replica)
        while holders.setdefault(key, [None] * one.world_size)[one.rank] is not None:
            replica += 1
            key = (*key[:2], replica)
        holders[key][one.rank] = one.worker
    return tuple(
        Copy(
            medium="mirror" if key[1] else "snapshot",
            world_size=len(workers),
            holders=tuple(workers),
            layout_id=-key[0],
        )
        for key, workers in sorted(holders.items())
    )
