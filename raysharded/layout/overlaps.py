"""What each worker has of each shard of a new layout: what need not be moved if it gets that shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raysharded.ids import WorkerId
from raysharded.layout.holdings import NOBODY, Holdings, holdings_of
from raysharded.layout.plan import MIRROR_BUFFER, Copy, Target
from raysharded.layout.segments import Segments, cut
from raysharded.layout.sources import in_memory
from raysharded.layout.state import StateSpec


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Overlaps:
    """Entry `i`: worker number `worker[i]` (of `holdings`) has `nbytes[i]` bytes of shard `shard[i]`; by worker, then by
    shard, those above 0. Replicated tensors are left out: who has any buffer has them."""

    holdings: Holdings
    worker: NDArray[np.int64]
    shard: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    in_memory: NDArray[np.int64]
    """Per shard the bytes that any worker has."""
    replicated_bytes: int
    """Of the replicated tensors, if any worker has them."""

    def wire_bytes(self, target: Target) -> int:
        """The bytes that go from worker to worker to fill the buffers of a target with as many shards."""
        shards = len(self.in_memory)
        workers = np.asarray(target.workers, np.int64).reshape(target.replicas, shards)
        key = self.worker * shards + self.shard
        total = 0
        for kind, replica in target.buffers:
            receivers = np.roll(workers[replica], -1) if kind == MIRROR_BUFFER else workers[replica]
            number = self.holdings.numbers(receivers)
            wanted = number * shards + np.arange(shards)
            at = np.minimum(np.searchsorted(key, wanted), max(len(key) - 1, 0))
            own = self.nbytes[at][key[at] == wanted].sum() if len(key) else 0
            total += int(self.in_memory.sum() - own) + int((number == NOBODY).sum()) * self.replicated_bytes
        return total


def find_overlaps(spec: StateSpec, copies: Sequence[Copy], shards: int) -> Overlaps:
    """The overlaps of what the holders of `copies` have in memory with the state cut into so many shards."""
    world_sizes = list(dict.fromkeys([shards, *(copy.world_size for copy in copies)]))
    segments = cut(spec, world_sizes)
    holdings = holdings_of(copies, [world_sizes.index(copy.world_size) for copy in copies])
    n = segments.first_replicated
    held = in_memory(segments, holdings)
    content, weight = segments.owner[0, :n], segments.weight
    segment, worker = _holders(segments, holdings)
    key, where = np.unique(worker * shards + content[segment], return_inverse=True)
    return Overlaps(
        holdings=holdings,
        worker=key // shards,
        shard=key % shards,
        nbytes=np.bincount(where, weight[segment], len(key)).astype(np.int64),
        in_memory=np.bincount(content, weight[:n] * held[:n], shards).astype(np.int64),
        replicated_bytes=int(weight[n:][held[n:] & (segments.owner[0, n:] == 0)].sum()),
    )


def count_wire_bytes(spec: StateSpec, copies: Sequence[Copy], target: Target) -> int:
    """What `make_plan(...).wire_bytes` would be, for a fraction of the time; missing bytes count as none.

    Laws: equal to the plan's number whenever there is a plan; the least that any plan for this target can have: each
    worker gets what it has not, once.
    """
    return find_overlaps(spec, copies, target.mesh.shards).wire_bytes(target)


def places_of(overlaps: Overlaps, workers: Sequence[WorkerId]) -> NDArray[np.int64]:
    """Per entry the place of its worker in `workers`; -1 if it is not there."""
    number = overlaps.holdings.numbers(workers)
    place = np.full(len(overlaps.holdings.workers) + 1, -1, np.int64)
    place[number[number != NOBODY]] = np.flatnonzero(number != NOBODY)
    return place[overlaps.worker]


def _holders(segments: Segments, holdings: Holdings) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All pairs of a segment of a cut class and a worker that has it, each once."""
    found = []
    for family in holdings.families:
        holder = family.holder[segments.owner[family.size, : segments.first_replicated]]
        segment, column = np.nonzero(holder != NOBODY)
        found.append((segment, holder[segment, column]))
    if len(found) == 1:
        return found[0]
    num = max(len(holdings.workers), 1)
    both = np.unique(np.concatenate([np.zeros(0, np.int64), *(segment * num + worker for segment, worker in found)]))
    return both // num, both % num
