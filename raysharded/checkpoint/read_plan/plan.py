"""The ordered operations of each rank in a load: read, send, receive. Pure.

In the first phase ranks read boxes that they need themselves straight into place, and send them to the others that need
the same. In later phases they read slabs of unions into buffers, a bounded amount per phase, and every rank gets its
part. No transfer of a phase begins before all ranks have finished the phase's reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from raysharded.checkpoint.read_plan.dedup import Job, Share, meet

ROUND_BYTES = 256 << 20
"""Maximum size of all transfers that are in flight at once."""


@dataclass(frozen=True, slots=True)
class Region:
    """Cells of a tensor, in a rank's own memory of it."""

    number: int
    """Number of one of the rank's tensors."""
    which: int
    """Number of one of the tensor's boxes on this rank; NO_BOX for a read into a buffer."""
    offsets: tuple[int, ...]
    """Offsets in the whole tensor."""
    sizes: tuple[int, ...]


NO_BOX = -1


@dataclass(frozen=True, slots=True)
class Move:
    """Cells that one rank has read and others need, as seen by one rank."""

    round: int
    source: int
    targets: tuple[int, ...]
    region: Region
    """Region on this rank."""
    buffer: int
    """Number of the phase's buffer that holds the cells; NO_BOX if they are, or arrive, in place."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Operations of one rank in one phase."""

    reads: list[Region] = field(default_factory=list)
    """Regions to read. Those without a box go into buffers, in this order."""
    moves: list[Move] = field(default_factory=list)
    """Moves in an order common to all ranks. A move from a rank to itself copies from a buffer into place."""

    def to_json(self) -> dict[str, Any]:
        return {
            "reads": [_region_to_json(region) for region in self.reads],
            "moves": [[m.round, m.source, m.targets, _region_to_json(m.region), m.buffer] for m in self.moves],
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> Phase:
        return Phase(
            [_region_from_json(region) for region in value["reads"]],
            [
                Move(turn, source, tuple(targets), _region_from_json(region), buffer)
                for turn, source, targets, region, buffer in value["moves"]
            ],
        )


def phases_of(shares: Sequence[Sequence[Share]], jobs: Sequence[Job], buffer_bytes: int) -> list[list[Phase]]:
    """The phases of each rank, equally many for all. Buffers of one phase take about `buffer_bytes` at most."""
    number_of = _phase_numbers(len(shares), jobs, buffer_bytes)
    plans = [[Phase() for _ in range(max(number_of, default=0) + 1)] for _ in shares]
    sent = [0] * len(plans[0])
    for job, at in zip(jobs, number_of, strict=True):
        phases = [plan[at] for plan in plans]
        turn = sent[at] // ROUND_BYTES
        moved = _add_joint(job, shares, phases, turn) if job.joint else _add_direct(job, phases, turn)
        sent[at] += moved
    return plans


def _phase_numbers(world_size: int, jobs: Sequence[Job], buffer_bytes: int) -> list[int]:
    """Phase of each job: 0 for reads in place. Other jobs fill the doer's buffers, phase by phase."""
    filled = [0] * world_size
    numbers: list[int] = []
    for job in jobs:
        numbers.append(1 + filled[job.doer] // buffer_bytes if job.joint else 0)
        filled[job.doer] += job.size_bytes if job.joint else 0
    return numbers


def _add_direct(job: Job, phases: Sequence[Phase], turn: int) -> int:
    """Let the doer read the box into place and send it to the others. Returns the bytes sent."""
    _, number, which = job.place
    phases[job.doer].reads.append(Region(number, which, *job.box))
    others = [place for place in job.places if place != job.place]
    targets = tuple(rank for rank, _, _ in others)
    for rank, number, which in job.places if others else ():
        phases[rank].moves.append(Move(turn, job.doer, targets, Region(number, which, *job.box), NO_BOX))
    return job.size_bytes * len(others)


def _add_joint(job: Job, shares: Sequence[Sequence[Share]], phases: Sequence[Phase], turn: int) -> int:
    """Let the doer read the box into a buffer and send every rank its part. Returns the bytes sent."""
    doer = phases[job.doer]
    buffer = sum(region.which == NO_BOX for region in doer.reads)
    doer.reads.append(Region(job.place[1], NO_BOX, *job.box))
    sent = 0
    for rank, number, which in job.places:
        part = meet(job.box, shares[rank][number].boxes[which])
        if part is None:
            continue
        if rank != job.doer:
            source = Region(job.place[1], NO_BOX, *part)
            doer.moves.append(Move(turn, job.doer, (rank,), source, buffer))
            sent += math.prod(part[1]) * shares[rank][number].item_bytes
        target = Region(number, which, *part)
        phases[rank].moves.append(Move(turn, job.doer, (rank,), target, buffer if rank == job.doer else NO_BOX))
    return sent


def _region_to_json(region: Region) -> list[Any]:
    return [region.number, region.which, region.offsets, region.sizes]


def _region_from_json(value: list[Any]) -> Region:
    number, which, offsets, sizes = value
    return Region(number, which, tuple(offsets), tuple(sizes))
