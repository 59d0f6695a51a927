"""The copy of each worker's newest shard in another worker's host memory, sent beside the next step's computation."""

from __future__ import annotations

from typing import Any

from raysharded.actors.process_group import Groups
from raysharded.actors.restore import Place
from raysharded.actors.shards import ShardBuffer, ShardStore
from raysharded.layout import mirror_of


class Mirror:
    """Sends this worker's snapshots to the rank after it and receives those of the rank before.

    Training thread only.
    """

    def __init__(self, place: Place, groups: Groups, store: ShardStore) -> None:
        self._place, self._groups, self._store = place, groups, store
        self._works: list[Any] = []
        self._receiving: ShardBuffer | None = None
        self._sending: ShardBuffer | None = None

    def start(self, own: ShardBuffer) -> None:
        """Start both transfers; `own` must not change until `join` returns."""
        if not self._place.has_mirror:
            return
        world, rank = own.world_size, self._place.rank
        source = mirror_of(rank, world)
        target = next(r for r in range(world) if mirror_of(r, world) == rank)
        into = self._store.begin(own.step, own.layout, "mirror", world, source, own.spec)
        self._receiving, self._sending = into, own
        state = self._groups.state
        if into.data.numel():
            self._works.append(state.recv([into.data], source, own.step))
        if own.data.numel():
            self._works.append(state.send([own.data], target, own.step))

    def join(self) -> None:
        """Return when both transfers are complete; raises RuntimeError if a peer is gone."""
        works, self._works = self._works, []
        for work in works:
            work.wait()
        if self._receiving is not None:
            self._receiving.complete = True
            self._receiving = None
