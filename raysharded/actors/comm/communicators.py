"""The accelerator's communicators of one generation, which can be aborted at any time, all together.

A communicator is registered before it connects, so that `abort` finds it while it waits for a lost peer. Aborting one
may wait for its kernels on the device, and these for the kernels of another communicator. So all are aborted at once,
each in a separate thread: the caller waits for them for a limited time. NCCL's group calls do not help: their depth is
kept per thread, and torch aborts each communicator in a new one.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
from functools import partial
from typing import Any

from raysharded.actors.comm.lasting_threads import Transfer, begin
from raysharded.actors.device.accelerator import accelerator
from raysharded.actors.device.device_waits import waits_for_peers
from raysharded.errors import CollectiveAborted
from raysharded.layout import Mesh

_log = logging.getLogger(__name__)
ABORT_TIMEOUT_S = 2.0
"""Time that the caller of an abort waits for its end. The driver gives members 3 s and more to answer."""


class Communicators:
    """The communicators of one generation on this worker. `abort`: any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: list[Any] = []
        self._is_aborted = False
        self._aborting: list[Transfer] = []
        self.train: Any = None
        """Torch's backend of this worker's shard group, once it is connected."""
        self.data: Any = None
        self.tensor: Any = None
        """With tensor parallelism: of the workers of one tensor rank, and of one data shard."""
        self.replicas: Any = None
        """That of the workers that hold this worker's shard, if there are several."""

    @waits_for_peers
    def connect_mesh(self, mesh: Mesh, rank: int, store: Any, timeout: datetime.timedelta) -> None:
        """Connect the communicators of a mesh. As `connect`."""
        replica, shard = mesh.replica_of(rank), mesh.shard_of(rank)
        self.train = self.connect(f"train/{replica}", store, shard, mesh.shards, timeout)
        if mesh.tensor > 1:
            place, data_rank, data = mesh.tensor_of(rank), mesh.data_rank_of(rank), mesh.data
            self.tensor = self.connect(f"tensor/{data_rank}", store, place, mesh.tensor, timeout)
            self.data = self.connect(f"data/{replica}/{place}", store, data.shard_of(data_rank), data.shards, timeout)
        if mesh.replicas > 1:
            self.replicas = self.connect(f"replicas/{shard}", store, replica, mesh.replicas, timeout)

    @waits_for_peers
    def connect(self, name: str, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
        """A torch backend that is connected to all members. `store`: of the generation; `name`: unique in it.

        Raises CollectiveAborted after an abort. Only in a thread that may be abandoned: a library may ignore it.
        """
        made = accelerator().communicator(name, store, rank, size, timeout)
        with self._lock:
            if self._is_aborted:
                raise CollectiveAborted(f"aborted before {name} was connected")
            self._made.append(made)
        backend = accelerator().connect(made)
        with self._lock:
            aborted = self._is_aborted
        if aborted:
            accelerator().abort(made)  # the abort may have come before there was anything to abort
            raise CollectiveAborted(f"aborted while {name} was connected")
        return backend

    def abort(self) -> bool:
        """Make every use of the communicators fail, also those that are being connected. Idempotent.

        True if it has ended, False if it continues in the background after `ABORT_TIMEOUT_S`.
        """
        with self._lock:
            self._is_aborted = True
            made, self._made = self._made, []
            self._aborting += [begin(partial(accelerator().abort, each), "abort communicators") for each in made]
            aborting = list(self._aborting)
        until = time.monotonic() + ABORT_TIMEOUT_S
        if all(each.ended.wait(max(0.0, until - time.monotonic())) for each in aborting):
            return True
        _log.warning("the communicators of a generation are still being aborted after %.0f s", ABORT_TIMEOUT_S)
        return False

    def release(self) -> None:
        """Refer to no backend any more. After `abort`."""
        self.train = self.data = self.tensor = self.replicas = None
