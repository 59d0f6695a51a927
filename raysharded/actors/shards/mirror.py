"""A copy of each worker's newest shard in another worker's host memory, sent in the background of the next step."""

from __future__ import annotations

from typing import Any, Protocol

from raysharded.actors.comm.abortable_wait import GRACE_S, join_or_leave
from raysharded.actors.comm.groups import Groups
from raysharded.actors.comm.host_group import HostGroup
from raysharded.actors.comm.lasting_threads import begin
from raysharded.actors.device.device_waits import waits_for_peers
from raysharded.actors.shards.position import RankPosition
from raysharded.actors.shards.store import ShardBuffer, ShardStore
from raysharded.errors import CollectiveAborted
from raysharded.layout import keeper_of


class SnapshotReplicator(Protocol):
    """Protection of a snapshot against the loss of its worker, in the background. Training thread only."""

    def start(self, own: ShardBuffer) -> None:
        """Start with a snapshot, which may still be filling; it is held until the end."""
        ...

    def join(self) -> int:
        """Return the bytes received once this worker's part is done; raises `CollectiveAborted` if a peer is lost."""
        ...

    def settle(self) -> None:
        """After an abort: return when nothing that others need is written or read any more."""
        ...


class Mirror:
    """A `SnapshotReplicator` that sends this worker's snapshots to its mirror holder, and receives those that it holds.

    Training thread only. A mirror counts as soon as it has arrived, not only when the next step waits for it. A loss in
    the middle of that step then costs only the step itself.
    """

    def __init__(self, place: RankPosition, groups: Groups, store: ShardStore) -> None:
        self._place, self._groups, self._store = place, groups, store
        self._transfer: _Transfer | None = None

    def start(self, own: ShardBuffer) -> None:
        """Start both transfers; `own`, which may still be filling, is held until they have ended."""
        if not self._place.has_mirror:
            return
        mesh, rank = self._place.mesh, self._place.rank
        target = keeper_of(rank, mesh.shards, mesh.apart)
        into = self._place.begin_mirror(self._store, own.step, own.spec)
        self._transfer = _Transfer(self._groups.state, into, own, target)

    def join(self) -> int:
        """Return the bytes received when both transfers are complete; raises `CollectiveAborted` if a peer is lost."""
        transfer = self._transfer
        if transfer is None:
            return 0
        join_or_leave(transfer.running, lambda: self._groups.aborted)
        self._transfer = None
        if transfer.error is not None:
            raise CollectiveAborted(f"the mirror's transfer: {transfer.error}") from transfer.error
        return transfer.size_bytes

    @waits_for_peers
    def settle(self) -> None:
        """After an abort: wait for the transfers, but abandon one that gloo keeps: what it fills never counts."""
        if self._transfer is not None:
            self._transfer.running.ended.wait(GRACE_S)


class _Transfer:
    """Transfer of one mirror to its holder, as soon as its bytes are in host memory, and of one to this worker."""

    def __init__(self, group: HostGroup, into: ShardBuffer, own: ShardBuffer, target: int) -> None:
        self._group, self._target = group, target
        self._into, self._own = into, own
        """Kept unchanged, with the works: gloo writes to, and reads from, their memory."""
        self._works: list[Any] = []
        self.size_bytes = into.data.numel()
        self.error: Exception | None = None
        own.hold()
        self.running = begin(self._run, "mirror")

    def _run(self) -> None:
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
        except Exception as error:  # noqa: BLE001 - passed to the training thread: a failed mirror is no commit
            self.error = error
        finally:
            self._own.release()
