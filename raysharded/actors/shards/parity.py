"""Parity blocks of each worker's newest shard in other workers' host memory, computed in the background.

Without parity a mirror replaces them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from raysharded.actors.comm.abortable_wait import GRACE_S, join_or_leave
from raysharded.actors.comm.groups import Groups
from raysharded.actors.comm.host_group import HostGroup
from raysharded.actors.comm.lasting_threads import begin
from raysharded.actors.device.device_waits import waits_for_peers
from raysharded.actors.shards import block_gather
from raysharded.actors.shards.block_gather import GatherBuffers, Needed, Stream, gather, num_pieces, send
from raysharded.actors.shards.erasure import Bytes, ErasureCode, erasure_code
from raysharded.actors.shards.mirror import Mirror, SnapshotReplicator
from raysharded.actors.shards.position import RankPosition
from raysharded.actors.shards.store import ShardBuffer, ShardStore
from raysharded.errors import CollectiveAborted
from raysharded.layout import Parity, block_bytes, part_range, shard_map


class ParityKeeper:
    """A `raysharded.actors.shards.mirror.SnapshotReplicator` with parity blocks. Training thread only.

    It holds parity blocks of other workers' snapshots, and sends this worker's parts to the holders of its blocks.
    """

    def __init__(self, place: RankPosition, parity: Parity, groups: Groups, store: ShardStore) -> None:
        self._place, self._parity, self._groups, self._store = place, parity, groups, store
        self._code = erasure_code(parity)
        self._sizes: _Sizes | None = None
        self._room, self._outgoing = GatherBuffers(), GatherBuffers()
        self._round: _Round | None = None

    def start(self, own: ShardBuffer) -> None:
        """Start to send and to compute; `own` is held until both have ended."""
        if self._sizes is None or self._sizes.spec is not own.spec:
            self._sizes = _Sizes(own, self._parity)
        length = self._sizes.length
        into = self._store.begin(
            own.step,
            own.layout,
            "parity",
            own.world_size,
            self._place.rank,
            own.spec,
            parity=self._parity,
            size_bytes=self._parity.m * length,
            degree=own.degree,
        )
        self._round = _Round(
            self._groups.state, self._parity, self._code, self._sizes, own, into, self._room, self._outgoing
        )

    def join(self) -> int:
        """Return the bytes received when the blocks are complete and this worker's parts were taken.

        Raises `CollectiveAborted` if a peer is lost.
        """
        if self._round is None:
            return 0
        join_or_leave(self._round.running, lambda: self._groups.aborted)
        if self._round.error is not None:  # kept, as it may still receive into its own memory
            raise CollectiveAborted(f"the parity's transfer: {self._round.error}") from self._round.error
        received, self._round = self._round.received, None
        return received

    @waits_for_peers
    def settle(self) -> None:
        """After an abort: wait for the round, but abandon one that gloo keeps: what it fills never counts."""
        if self._round is not None:
            self._round.running.ended.wait(GRACE_S)


class _Sizes:
    """Lengths of the buffers from whose parts one rank computes parity blocks."""

    def __init__(self, own: ShardBuffer, parity: Parity) -> None:
        self.spec, world_size, degree = own.spec, own.world_size, own.degree
        self.length = block_bytes(own.spec, world_size, parity, degree)
        stripe = parity.stripe_kept(own.rank, 0, world_size)
        members = [parity.rank_in(stripe, part, world_size) for part in range(parity.k)]
        self.of_rank = {member: shard_map(own.spec, world_size, member, degree).size_bytes for member in members}


class _Round:
    """One step's parity blocks: this worker's parts are offered to their holders, and its own blocks computed."""

    def __init__(
        self,
        group: HostGroup,
        parity: Parity,
        code: ErasureCode,
        sizes: _Sizes,
        own: ShardBuffer,
        into: ShardBuffer,
        room: GatherBuffers,
        outgoing: GatherBuffers,
    ) -> None:
        self._group, self._parity, self._code, self._sizes = group, parity, code, sizes
        self._own, self._into, self._room = own, into, room
        self._outgoing, self._forwarded = outgoing, list[list[Any]]()
        self.received = 0
        self.error: Exception | None = None
        own.hold()
        self.running = begin(self._run, "parity")

    def _run(self) -> None:
        try:
            self._own.wait()
            coming = self._receive_others()
            sending = [work for offer in self._offers() for work in offer]
            self.received += gather(self._group, [self._needed()], self._room)
            for work in coming:
                self._group.deliver(work)
            self._into.complete = True
            for work in [*sending, *itertools.chain(*self._forwarded)]:
                self._group.deliver(work)
        except Exception as error:  # noqa: BLE001 - passed to the training thread: failed parity is no commit
            self.error = error
        finally:
            self._own.release()

    def _offers(self) -> Iterator[list[Any]]:
        """This worker's parts, sent to the first holder of each one's stripe."""
        k, length, world, rank = self._parity.k, self._sizes.length, self._own.world_size, self._own.rank
        for part in range(k):
            start, stop = part_range(self._own.data.numel(), part, length)
            keeper = self._keeper(self._parity.stripe_of(rank, part, world), 0)
            stream = Stream(peer=keeper, tag=part, size_bytes=stop - start)
            yield send(self._group, stream, self._own.data[start:stop], length)

    def _keeper(self, stripe: int, block: int) -> int:
        """Rank that holds parity block number `block` of a stripe."""
        return self._parity.rank_in(stripe, self._parity.k + block, self._own.world_size)

    def _needed(self) -> Needed:
        """All blocks of the stripe of which this worker is the first holder."""
        length, world = self._sizes.length, self._own.world_size
        stripe = self._parity.stripe_kept(self._own.rank, 0, world)
        sources = []
        for part in range(self._parity.k):
            member = self._parity.rank_in(stripe, part, world)
            start, stop = part_range(self._sizes.of_rank[member], part, length)
            sources.append(Stream(peer=member, tag=part, size_bytes=stop - start))
        return Needed(length=length, sources=sources, compute=self._encode)

    def _encode(self, pieces: list[Bytes], start: int) -> None:
        """Encode one piece: that of the first block stays here, those of the others go to their holders."""
        size, turn = len(pieces[0]), len(self._forwarded)
        if turn >= 2:  # its memory is reused
            for work in self._forwarded[turn - 2]:
                self._group.deliver(work)
        first = self._into.data[start : start + size]
        others = [self._outgoing.take(turn, block, size) for block in range(1, self._parity.m)]
        self._code.encode(pieces, [first.numpy(), *(other.numpy() for other in others)])
        works: list[Any] = []
        for block, other in enumerate(others, 1):
            keeper = self._keeper(self._parity.stripe_kept(self._own.rank, 0, self._own.world_size), block)
            works.append(self._group.send(other, keeper, self._tag(block, start)))
        self._forwarded.append(works)

    def _receive_others(self) -> list[Any]:
        """Start to receive the blocks that this worker holds of stripes whose first holder is another."""
        works: list[Any] = []
        for block in range(1, self._parity.m):
            first = self._keeper(self._parity.stripe_kept(self._own.rank, block, self._own.world_size), 0)
            into = self._into.data[block * self._sizes.length : (block + 1) * self._sizes.length]
            for number, piece in enumerate(into.split(block_gather.PIECE_BYTES)):
                works.append(self._group.recv(piece, first, self._tag(block, number * block_gather.PIECE_BYTES)))
                self.received += piece.numel()
        return works

    def _tag(self, block: int, start: int) -> int:
        """Tag of a piece of a parity block; no piece of a part has it."""
        return (self._parity.k + block) * num_pieces(self._sizes.length) + start // block_gather.PIECE_BYTES


def keeper_of(place: RankPosition, groups: Groups, store: ShardStore) -> SnapshotReplicator:
    """Parity if it is wanted and there are workers enough, otherwise a mirror."""
    if place.parity is not None and place.has_parity:
        return ParityKeeper(place, place.parity, groups, store)
    return Mirror(place, groups, store)
