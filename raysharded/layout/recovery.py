"""The newest complete step: every byte of it is in some worker's memory, or can be computed from what is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from raysharded.errors import ConfigError
from raysharded.ids import WorkerId
from raysharded.layout.parity import Parity, Rebuild, plan_rebuild
from raysharded.layout.reshard.holdings import holdings_of
from raysharded.layout.reshard.plan import Copy
from raysharded.layout.reshard.segments import cut, layout_of
from raysharded.layout.reshard.sources import in_memory
from raysharded.layout.sharding import require_rank
from raysharded.layout.state import StateSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """One buffer that a live worker holds complete: of rank `rank` of `world_size`, as it was after `step`.

    `layout_id` distinguishes layouts (a generation's id does). One `layout_id` has one world size and one tensor
    parallel degree.
    """

    worker: WorkerId
    step: int
    medium: Literal["snapshot", "mirror", "parity"]
    """Kind of the buffer. A "parity" buffer has the blocks that this rank holds under `parity`."""
    world_size: int
    rank: int
    layout_id: int
    parity: Parity | None = None
    tensor: int = 1
    """Tensor parallel degree of the layout, as in `Mesh`."""

    def __post_init__(self) -> None:
        require_rank(self.world_size, self.rank)


class Recoverable(NamedTuple):
    """A step whose bytes are all available, once the rebuilds have been carried out."""

    step: int
    copies: tuple[Copy, ...]
    rebuilds: tuple[Rebuild, ...] = ()


def recoverable(spec: StateSpec, held: Sequence[Held], *, rebuilding: bool = True) -> Recoverable | None:
    """The newest step whose bytes are all held, with its copies for the planner; None if there is none.

    The bytes may be in several layouts and media. The copies are ordered by newest layout, snapshots before mirrors. If
    several workers hold the same buffer there is a copy for each. The order of `held` does not matter.

    With `rebuilding`, bytes that parity blocks can restore count as held, as a mirror, by the worker that is to compute
    them. This is done only if needed, and for one layout alone if that suffices.
    """
    return _recoverable(spec, tuple(held), rebuilding)


@lru_cache(maxsize=64)  # a driver that waits for workers repeats the question several times at each tick
def _recoverable(spec: StateSpec, held: Sequence[Held], rebuilding: bool) -> Recoverable | None:
    by_step: dict[int, list[Held]] = {}
    for one in held:
        by_step.setdefault(one.step, []).append(one)
    for step in sorted(by_step, reverse=True):
        buffers = [one for one in by_step[step] if one.medium != "parity"]
        copies = _copies(buffers)
        if is_complete(spec, copies):
            return Recoverable(step, copies)
        possible = _rebuilds(by_step[step]) if rebuilding else []
        for rebuilds in (*((one,) for one in possible), tuple(possible)):
            copies = _copies([*buffers, *(one for rebuild in rebuilds for one in _rebuilt(rebuild, step))])
            if rebuilds and is_complete(spec, copies):
                return Recoverable(step, copies, rebuilds)
    return None


def _rebuilds(held: Sequence[Held]) -> list[Rebuild]:
    """Rebuilds that parity blocks allow, by newest layout."""
    found: list[Rebuild] = []
    layouts = {(one.layout_id, one.world_size, one.tensor, one.parity) for one in held if one.parity is not None}
    for layout_id, world_size, tensor, parity in sorted(layouts, key=lambda layout: layout[0], reverse=True):
        assert parity is not None
        own: dict[int, WorkerId] = {}
        kept: dict[int, WorkerId] = {}
        for one in sorted(held, key=lambda h: (h.medium, h.worker), reverse=True):  # a snapshot before a mirror
            if one.layout_id == layout_id:
                (kept if one.medium == "parity" else own).setdefault(one.rank, one.worker)
        rebuild = plan_rebuild(parity, layout_id, world_size, own, kept, tensor)
        if rebuild is not None:
            found.append(rebuild)
    return found


def _rebuilt(rebuild: Rebuild, step: int) -> list[Held]:
    return [
        Held(
            worker=worker,
            step=step,
            medium="mirror",
            world_size=rebuild.world_size,
            rank=rank,
            layout_id=rebuild.layout_id,
            tensor=rebuild.tensor,
        )
        for rank, worker in rebuild.lost
    ]


def is_complete(spec: StateSpec, copies: Sequence[Copy]) -> bool:
    """True if every byte of the state is in at least one of the copies.

    Law: equals "the planner finds nothing missing", for any target.
    """
    if not copies:
        return spec.total_bytes == 0
    if any(copy.medium == "storage" for copy in copies):
        return True
    layouts = list(dict.fromkeys(map(layout_of, copies)))
    holdings = holdings_of(copies, layouts, [layouts.index(layout_of(copy)) for copy in copies])
    return bool(in_memory(cut(spec, layouts), holdings).all())


def _copies(held: Sequence[Held]) -> tuple[Copy, ...]:
    layouts: dict[int, tuple[int, int]] = {}
    holders: dict[tuple[int, int, int], list[WorkerId | None]] = {}
    in_copy: set[tuple[tuple[int, int, int], WorkerId]] = set()
    ordered = sorted(set(held), key=lambda h: (-h.layout_id, h.medium == "mirror", h.rank, h.worker))
    for one in ordered:
        layout = (one.world_size, one.tensor)
        if layouts.setdefault(one.layout_id, layout) != layout:
            raise ConfigError(
                f"recoverable: layout {one.layout_id} is reported with world size and tensor parallel degree "
                f"{layouts[one.layout_id]} and {layout}; give every layout a different id."
            )
        replica = 0
        key = (-one.layout_id, int(one.medium == "mirror"), replica)
        while holders.setdefault(key, [None] * one.world_size)[one.rank] is not None or (key, one.worker) in in_copy:
            replica += 1
            key = (*key[:2], replica)
        holders[key][one.rank] = one.worker
        in_copy.add((key, one.worker))
    return tuple(
        Copy(
            medium="mirror" if key[1] else "snapshot",
            world_size=len(workers),
            holders=tuple(workers),
            tensor=layouts[-key[0]][1],
            layout_id=-key[0],
        )
        for key, workers in sorted(holders.items())
    )
