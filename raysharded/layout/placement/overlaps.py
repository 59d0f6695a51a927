"""Bytes that each worker has of each shard of a new layout: they need not be moved if it gets that shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raysharded.ids import WorkerId
from raysharded.layout.reshard.holdings import NOBODY, Holdings, holdings_of
from raysharded.layout.reshard.plan import MIRROR_BUFFER, Copy, Target
from raysharded.layout.reshard.segments import Layout, Segments, cut, layout_of
from raysharded.layout.reshard.sources import in_memory
from raysharded.layout.state import StateSpec


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Overlaps:
    """Bytes that workers have of shards.

    Entry `i`: worker number `worker[i]` (of `holdings`) has `nbytes[i]` bytes, above 0, of shard `shard[i]`. Entries
    are by worker, then by shard. Replicated tensors are left out: the holder of any buffer has them.
    """

    holdings: Holdings
    worker: NDArray[np.int64]
    shard: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    in_memory: NDArray[np.int64]
    """Bytes of each shard that any worker has."""
    replicated_bytes: int
    """Bytes of the replicated tensors, if any worker has them."""

    def wire_bytes(self, target: Target) -> int:
        """Bytes that go from worker to worker to fill the buffers of a target with as many shards."""
        shards = len(self.in_memory)
        workers = np.asarray(target.workers, np.int64).reshape(target.replicas, shards)
        key = self.worker * shards + self.shard
        total = 0
        for kind, replica in target.buffers:
            receivers = np.roll(workers[replica], -target.apart) if kind == MIRROR_BUFFER else workers[replica]
            number = self.holdings.numbers(receivers)
            wanted = number * shards + np.arange(shards)
            at = np.minimum(np.searchsorted(key, wanted), max(len(key) - 1, 0))
            own = self.nbytes[at][key[at] == wanted].sum() if len(key) else 0
            total += int(self.in_memory.sum() - own) + int((number == NOBODY).sum()) * self.replicated_bytes
        return total


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Gains:
    """Bytes that each worker need not receive if it has a certain shard.

    Entry `i`: worker `key[i] // shards`, shard `key[i] % shards`, `nbytes[i]` bytes, above 0. Keys are ascending.
    """

    shards: int
    key: NDArray[np.int64]
    nbytes: NDArray[np.int64]

    def of(self, worker: NDArray[np.int64], shard: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes of each pair of a worker and a shard."""
        if len(self.key) == 0:
            return np.zeros(len(worker), np.int64)
        wanted = worker * self.shards + shard
        at = np.minimum(np.searchsorted(self.key, wanted), len(self.key) - 1)
        return np.where(self.key[at] == wanted, self.nbytes[at], 0)

    def by_worker(self, num: int) -> list[list[tuple[int, int]]]:
        """(shard, bytes) of each of `num` workers."""
        rows: list[list[tuple[int, int]]] = [[] for _ in range(num)]
        columns = (self.key // self.shards, self.key % self.shards, self.nbytes)
        for worker, shard, nbytes in zip(*(column.tolist() for column in columns), strict=True):
            rows[worker].append((shard, nbytes))
        return rows


def find_overlaps(spec: StateSpec, copies: Sequence[Copy], layout: Layout) -> Overlaps:
    """Overlaps of the memory of the holders of `copies` with the shards of a layout."""
    layouts = list(dict.fromkeys([layout, *map(layout_of, copies)]))
    segments = cut(spec, layouts)
    holdings = holdings_of(copies, layouts, [layouts.index(layout_of(copy)) for copy in copies])
    n, num, shards = segments.first_replicated, segments.cut_slots, layout.world_size
    held = in_memory(segments, holdings)
    content, weight = segments.slot_rank[:num], segments.weight
    in_slot = weight[segments.slot[:num]]
    slot, worker = _holders(segments, holdings)
    key, where = np.unique(worker * shards + content[slot], return_inverse=True)
    return Overlaps(
        holdings=holdings,
        worker=key // shards,
        shard=key % shards,
        nbytes=np.bincount(where, in_slot[slot], len(key)).astype(np.int64),
        in_memory=np.bincount(content, in_slot * held[segments.slot[:num]], shards).astype(np.int64),
        replicated_bytes=int(weight[n:][held[n:] & (segments.owner[0, n:] == 0)].sum()),
    )


def count_wire_bytes(spec: StateSpec, copies: Sequence[Copy], target: Target) -> int:
    """Value of `make_plan(...).wire_bytes` in a fraction of the time; missing bytes count as none.

    Laws: equal to the plan's number whenever there is a plan; the least of any plan for this target: each worker gets
    what it lacks, once.
    """
    return find_overlaps(spec, copies, layout_of(target.mesh)).wire_bytes(target)


def find_gains(overlaps: Overlaps, workers: Sequence[WorkerId], apart: int | None) -> Gains:
    """Gains of these workers. `apart`: a worker also keeps a mirror of the shard so many before its own."""
    shards = len(overlaps.in_memory)
    number = overlaps.holdings.numbers(workers)
    place = np.full(len(overlaps.holdings.workers) + 1, NOBODY, np.int64)
    place[number[number != NOBODY]] = np.flatnonzero(number != NOBODY)
    worker = place[overlaps.worker]
    rows = np.flatnonzero(worker != NOBODY)
    worker, shard, nbytes = worker[rows], overlaps.shard[rows], overlaps.nbytes[rows]
    if apart is not None:
        worker, nbytes = np.tile(worker, 2), np.tile(nbytes, 2)
        shard = np.concatenate([shard, (shard + apart) % shards])
    key, where = np.unique(worker * shards + shard, return_inverse=True)
    return Gains(shards=shards, key=key, nbytes=np.bincount(where, nbytes, len(key)).astype(np.int64))


def _holders(segments: Segments, holdings: Holdings) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All pairs of a slot of a cut class and a worker that has its segment, each once."""
    found = []
    for family in holdings.families:
        holder = family.holder[segments.owner[family.row, segments.slot[: segments.cut_slots]]]
        slot, column = np.nonzero(holder != NOBODY)
        found.append((slot, holder[slot, column]))
    if len(found) == 1:
        return found[0]
    num = max(len(holdings.workers), 1)
    both = np.unique(np.concatenate([np.zeros(0, np.int64), *(slot * num + worker for slot, worker in found)]))
    return both // num, both % num
