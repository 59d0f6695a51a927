"""A double of NCCL's communicators in real processes: made without a peer, connected later, aborted from any thread.

gloo carries the bytes. The rest is behaviour that a run has to stand. A communicator that is being connected waits
until an abort. An abort waits for kernels of the generation's other communicators: it returns only when the aborts of
all have begun. After an abort every call fails.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from raysharded.actors.comm import sockets
from raysharded.actors.device.device_waits import waits_for_peers
from tests.actors.device.host_accelerator import HostAccelerator

NEVER_S = 600.0
"""Longer than any test."""


class Owner(Protocol):
    """The accelerator that makes doubles."""

    live: list[CommunicatorDouble]
    """Communicators that are connected and not aborted."""

    def note(self, call: str) -> None:
        """Called at the beginning of each call of a communicator; it may raise."""
        ...

    def blocks(self, call: str) -> bool:
        """True for `connect`, `connect for good` or `abort`, if it is to block."""
        ...


class CommunicatorDouble:
    """One communicator, which reports its calls to its accelerator."""

    def __init__(self, name: str, store: Any, rank: int, size: int, owner: Owner) -> None:
        self.name = name
        self.backend: Any = None
        self._store, self._rank, self._size, self._owner = store, rank, size, owner
        self._sockets: list[Any] = []
        self._lock, self.is_aborted = threading.Lock(), threading.Event()

    @waits_for_peers
    def eager_connect_single_device(self, device: torch.device) -> None:
        self._owner.note(f"connect {self.name}")
        if self._owner.blocks("connect"):
            self.is_aborted.wait(NEVER_S)
        if self._owner.blocks("connect for good"):
            threading.Event().wait(NEVER_S)
        if self.is_aborted.is_set():
            raise torch.distributed.DistBackendError("NCCL error: the communicator was aborted")
        before = sockets.open_sockets()
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stubs
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
        options._timeout = datetime.timedelta(seconds=20)
        self.backend = dist.ProcessGroupGloo(PrefixStore(self.name, self._store), self._rank, self._size, options)
        with self._lock:
            found = sockets.tcp(sockets.open_sockets() - before)
            self._sockets = [each for each in found if not sockets.listens(each)]
            if self.is_aborted.is_set():
                sockets.shut_down(self._sockets)
        self._owner.live.append(self)

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        self._owner.note(f"allreduce {self.name}")
        return self.backend.allreduce(tensors)

    @waits_for_peers
    def abort(self) -> None:
        self._owner.note(f"abort {self.name}")
        self.is_aborted.set()
        if self._owner.blocks("abort"):
            threading.Event().wait(NEVER_S)
        for each in tuple(self._owner.live):
            if each._store is self._store:  # this one's kernel waits for that one's
                each.is_aborted.wait(NEVER_S)
        self.end()
        self._owner.note(f"end {self.name}")

    def end(self) -> None:
        """Free all who wait in the communicator."""
        with self._lock:
            sockets.shut_down(self._sockets)
        if self in self._owner.live:
            self._owner.live.remove(self)


def _does_nothing(call: str) -> None:
    pass


class DoubleAccelerator(HostAccelerator):
    """A device in host memory with doubles of NCCL's communicators; calls block or fail as a test wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.live: list[CommunicatorDouble] = []
        """Communicators that are connected and not aborted."""
        self.blocking: set[str] = set()
        """`connect`, until an abort; `connect for good`; `abort`."""
        self.on_call: Callable[[str], None] = _does_nothing
        """Called at the beginning of each call of the device or a communicator; it may raise."""

    def note(self, call: str) -> None:
        self.calls.append(call)
        self.on_call(call.split(maxsplit=1)[0])

    def blocks(self, call: str) -> bool:
        return call in self.blocking

    def communicator(self, name: str, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
        self.note(f"make {name} {rank}/{size}")
        return CommunicatorDouble(name, store, rank, size, self)

    def connect(self, communicator: Any) -> Any:
        return super().connect(communicator).backend

    def pinned(self, size_bytes: int) -> torch.Tensor:
        self.on_call("pinned")
        return super().pinned(size_bytes)

    def drain(self, device: torch.device) -> None:
        self.on_call("drain")
        super().drain(device)

    def release_freed_memory(self) -> None:
        self.on_call("release_freed_memory")

    def new_stream(self, device: torch.device) -> Any:
        self.on_call("new_stream")
        return super().new_stream(device)

    def current_stream(self, device: torch.device) -> Any:
        self.on_call("current_stream")
        return super().current_stream(device)

    def record(self, stream: Any) -> Any:
        self.on_call("record")
        return super().record(stream)

    def keep_for_current_stream(self, tensor: torch.Tensor) -> None:
        self.on_call("keep_for_current_stream")

    def all_to_all(self, *args: Any) -> None:
        self.on_call("all_to_all")
        super().all_to_all(*args)
