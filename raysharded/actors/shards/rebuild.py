"""Lost shards, computed from parity blocks and the remaining state by the workers of a new generation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from raysharded.actors.comm.groups import Groups
from raysharded.actors.comm.host_group import HostGroup
from raysharded.actors.shards.block_gather import GatherBuffers, Needed, Stream, gather, send
from raysharded.actors.shards.erasure import Bytes, ErasureCode, erasure_code
from raysharded.actors.shards.store import ShardStore
from raysharded.ids import GenerationId, WorkerId
from raysharded.layout import Rebuild, StateSpec, block_bytes, part_range, shard_map


def rebuild(
    rebuilds: Sequence[Rebuild],
    step: int,
    spec: StateSpec,
    store: ShardStore,
    members: Sequence[WorkerId],
    worker: WorkerId,
    groups: Groups,
) -> int:
    """Compute this worker's share of a step's lost buffers into its store, and send others the blocks that they need.

    Returns the bytes received. Every member must call it.
    """
    found = [_Rebuilding(each, step, spec, store, members, worker, groups.state) for each in rebuilds]
    return groups.beside(lambda: sum(each.run() for each in found), "rebuild") if found else 0


class _Rebuilding:
    """The lost buffers of one layout."""

    def __init__(
        self,
        plan: Rebuild,
        step: int,
        spec: StateSpec,
        store: ShardStore,
        members: Sequence[WorkerId],
        worker: WorkerId,
        group: HostGroup,
    ) -> None:
        self._plan, self._step, self._spec, self._store = plan, step, spec, store
        self._worker, self._group = worker, group
        self._rank_of = {member: rank for rank, member in enumerate(members)}
        self._code = erasure_code(plan.parity)
        self._length = block_bytes(spec, plan.world_size, plan.parity, plan.tensor)
        layout, world = GenerationId(plan.layout_id), plan.world_size
        self._made = {
            rank: store.begin(step, layout, "mirror", world, rank, spec, degree=plan.tensor)
            for rank, at in plan.lost
            if at == worker
        }

    def run(self) -> int:
        sending = [work for offer in self._offers() for work in offer]
        received = gather(self._group, self._needed(), GatherBuffers())
        for work in sending:
            self._group.deliver(work)
        for buffer in self._made.values():
            buffer.complete = True
        return received

    def _offers(self) -> Iterator[list[Any]]:
        for number, repair in enumerate(self._plan.repairs()):
            for block in repair.blocks:
                if block.holder == self._worker != repair.at:
                    data = self._block(block.number, block.rank)
                    stream = self._stream(number, block.number, repair.at, data.numel())
                    yield send(self._group, stream, data, self._length)

    def _needed(self) -> Iterator[Needed]:
        k = self._plan.parity.k
        for number, repair in enumerate(self._plan.repairs()):
            if repair.at != self._worker:
                continue
            sources: list[Stream | Bytes] = []
            for block in repair.blocks:
                if block.holder == self._worker:
                    sources.append(self._block(block.number, block.rank).numpy())
                else:
                    size = self._length if block.number >= k else self._part_bytes(block.rank, block.number)
                    sources.append(self._stream(number, block.number, block.holder, size))
            numbers = [block.number for block in repair.blocks]
            start, stop = part_range(self._made[repair.rank].data.numel(), repair.part, self._length)
            into = self._made[repair.rank].data[start:stop].numpy()
            compute = partial(_decode, self._code, numbers, repair.part, into)
            yield Needed(length=self._length, sources=sources, compute=compute)

    def _stream(self, repair: int, block: int, peer: WorkerId, size_bytes: int) -> Stream:
        tag = repair * self._plan.parity.width + block
        return Stream(peer=self._rank_of[peer], tag=tag, size_bytes=size_bytes)

    def _part_bytes(self, rank: int, part: int) -> int:
        size_bytes = shard_map(self._spec, self._plan.world_size, rank, self._plan.tensor).size_bytes
        start, stop = part_range(size_bytes, part, self._length)
        return stop - start

    def _block(self, number: int, rank: int) -> Any:
        """A block that this worker holds, without trailing zeros."""
        k, layout = self._plan.parity.k, GenerationId(self._plan.layout_id)
        if number >= k:
            kept = self._store.find(self._step, layout, "parity", rank)
            return kept.data[(number - k) * self._length : (number - k + 1) * self._length]
        shard = self._store.find_shard(self._step, layout, rank)
        start, stop = part_range(shard.data.numel(), number, self._length)
        return shard.data[start:stop]


def _decode(code: ErasureCode, numbers: Sequence[int], part: int, into: Bytes, pieces: list[Bytes], start: int) -> None:
    """Decode into the part of a buffer, which may be shorter than the block."""
    wanted = max(0, min(len(into) - start, len(pieces[0])))
    if wanted:
        blocks = {number: piece[:wanted] for number, piece in zip(numbers, pieces, strict=True)}
        code.decode(blocks, part, into[start : start + wanted])
