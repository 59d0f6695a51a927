"""The copy of each worker's newest shard in another worker's host memory, sent beside the next step's computation."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from raysharded.actors.comm.abortable_wait import GRACE_S, join_or_leave, waits_for_peers
from raysharded.actors.comm.groups import Groups
from raysharded.actors.comm.host_group import HostGroup
from raysharded.actors.shards.position import RankPosition
from raysharded.actors.shards.store import ShardBuffer, ShardStore
from raysharded.errors import CollectiveAborted
from raysharded.layout import keeper_of


class SnapshotReplicator(Protocol):
    """Makes a snapshot survive the loss of its worker, beside training. Training thread only."""

    def start(self, own: ShardBuffer) -> None:
        """Begin with a snapshot, which may still be being filled, and is held until that has ended."""
        ...

    def join(self) -> int:
        """Return when this worker's part of it is done, with the bytes received; raises `CollectiveAborted` if a peer
        is gone."""
        ...

    def settle(self) -> None:
        """After an abort: return when nothing is written or read any more that anyone else needs."""
        ...


class Mirror:
    """Sends this worker's snapshots to the rank that keeps them, and receives those that it keeps itself.

    Implements `SnapshotReplicator`.
    Training thread only. A mirror counts as soon as it has arrived, not only when the next step asks for it: a loss in
    the middle of that step then costs nothing but the step itself.
    """

    def __init__(self, place: RankPosition, groups: Groups, store: ShardStore) -> None:
        self._place, self._groups, self._store = place, groups, store
        self._transfer: _Transfer | None = None

    def start(self, own: ShardBuffer) -> None:
        """Start both transfers; `own` is held until they have ended. It may still be being filled."""
        if not self._place.has_mirror:
            return
        mesh, rank = self._place.mesh, self._place.rank
        target = keeper_of(rank, mesh.shards, mesh.apart)
        into = self._place.begin_mirror(self._store, own.step, own.spec)
        self._transfer = _Transfer(self._groups.state, into, own, target)

    def join(self) -> int:
        """Return when both transfers are complete, with the bytes received; raises `CollectiveAborted` if a peer is
        gone."""
        transfer = self._transfer
        if transfer is None:
            return 0
        join_or_leave(transfer, lambda: self._groups.aborted)
        self._transfer = None
        if transfer.error is not None:
            raise CollectiveAborted(f"the mirror's transfer: {transfer.error}") from transfer.error
        return transfer.size_bytes

    @waits_for_peers
    def settle(self) -> None:
        """After an abort: let the transfers end. One that gloo keeps is left: what it fills never counts."""
        if self._transfer is not None:
            self._transfer.join(GRACE_S)


class _Transfer(threading.Thread):
    """Sends one mirror, as soon as its bytes have come to host memory, and receives one."""

    def __init__(self, group: HostGroup, into: ShardBuffer, own: ShardBuffer, target: int) -> None:
        super().__init__(name="mirror", daemon=True)
        self._group, self._target = group, target
        self._into, self._own = into, own
        """Kept as they are, with the works: gloo writes to, and reads from, their memory."""
        self._works: list[Any] = []
        self.size_bytes = into.data.numel()
        self.error: Exception | None = None
        own.hold()
        self.start()

    def run(self) -> None:
        group, into, own = self._group, self._into, self._own
        try:
            own.wait()
            receiving = [group.recv(into.data, into.rank, own.step)] if into.data.numel() else []
            self._works += receiving
            sending = [group.send(own.data, self._target, own.step)] if own.data.numel() else []
            self._works += sending
            for work in receiving:
                group.deliver(work)
            into.complete = True
            for work in sending:
                group.deliver(work)
        except Exception as error:  # noqa: BLE001 - handed over to the training thread: a mirror that is none is no commit
            self.error = error
        finally:
            self._own.release()
