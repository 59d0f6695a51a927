"""The accelerator of this process: the seam between the engine and a kind of device with streams.

The engine runs on a CPU, on CUDA (`cuda`), or on any other `Accelerator` that `use` puts in CUDA's place: tests run it
on simulated streams, and with a double of NCCL. A process has one accelerator and may hold tensors beside it; `has`
is True for those of the accelerator alone.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist


class Event(Protocol):
    """A place in a stream's order of work."""

    def query(self) -> bool:
        """True if all work before the place is done."""
        ...

    def synchronize(self) -> None:
        """Return when all work before the place is done."""
        ...


class Stream(Protocol):
    """Work that the device does in order."""

    def wait_stream(self, stream: Any) -> None:
        """Let later work of this stream wait for all work of another so far."""
        ...

    def wait_event(self, event: Any) -> None:
        """Let later work of this stream wait for the place in another."""
        ...


class Accelerator(Protocol):
    """A kind of device with streams, and the communicators between devices of this kind."""

    device_type: str
    """Torch's type of its tensors, and of the meshes of its workers."""
    backend: str
    """Torch's name of the communicators' backend."""
    backend_type: dist.ProcessGroup.BackendType

    def is_available(self) -> bool:
        """True if this process can use such a device."""
        ...

    def why_unusable(self) -> str:
        """The reason that this process cannot use such a device, and the way out; empty if it can."""
        ...

    def names(self) -> list[str]:
        """Models of the devices that this process sees."""
        ...

    def free_bytes(self) -> tuple[int, ...]:
        """Free memory of each device that this process sees."""
        ...

    def library_version(self) -> str:
        """Version of the communicators' library; empty if torch was built without it."""
        ...

    def prepare_environment(self, *, exact: bool) -> None:
        """Make settings that must precede the device's first use, unless the environment has others.

        Raises ConfigError for one that would end survivors. `exact`: for results with the same bits.
        """
        ...

    def kept_settings(self) -> tuple[str, ...]:
        """Settings that the environment had before `prepare_environment`, each as `NAME=VALUE`, with a note."""
        ...

    def select(self, assigned: Sequence[str]) -> torch.device:
        """Make this worker's device the process's; returns it. `assigned`: by the scheduler; empty: the first.

        Raises ConfigError, with the way out, if there is none, or if a worker cannot use it.
        """
        ...

    def enter_thread(self) -> None:
        """Make the process's device, if it has one, the calling thread's current one."""
        ...

    def current(self) -> torch.device:
        """The current device, for tensors and communicators."""
        ...

    def has(self, device: torch.device) -> bool:
        """True if work on tensors of this device runs in the order of the accelerator's streams."""
        ...

    def identity(self, device: torch.device) -> str:
        """Number and UUID of a device on its machine, as far as they are known."""
        ...

    def facts(self, device: torch.device) -> Mapping[str, str]:
        """Facts about a device and its libraries that bits depend on."""
        ...

    def complaints(self, device: torch.device) -> tuple[str, ...]:
        """Reports of the device's driver on it since `select`, each as an object of the verb "reported"."""
        ...

    def use(self, device: torch.device) -> Mapping[str, float]:
        """Use of the device now, by name, for metrics; see docs/metrics.md. Any thread; may take milliseconds."""
        ...

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Page-locked host memory: uint8 [size_bytes], not initialized."""
        ...

    def drain(self, device: torch.device) -> None:
        """Return when all streams of the device have done all work. May wait without a limit."""
        ...

    def release_freed_memory(self) -> None:
        """Give memory that no tensor uses back to the device, for tensors of other sizes and other libraries."""
        ...

    def new_stream(self, device: torch.device) -> Stream: ...

    def current_stream(self, device: torch.device) -> Stream: ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which work is launched on a stream."""
        ...

    def record(self, stream: Any) -> Event:
        """The place behind all work of a stream so far. A thread that waits for it releases its core."""
        ...

    def keep_for_current_stream(self, tensor: torch.Tensor) -> None:
        """Give a tensor's memory to no other tensor before the current stream's work so far is done."""
        ...

    def make_compilation_exact(self) -> None:
        """Let the calling thread compile no kernel whose order of additions depends on measured times."""
        ...

    def forbid_graphs(self, refuse: Callable[[], NoReturn]) -> None:
        """Let this process call `refuse` where it begins to record a graph of the device's kernels."""
        ...

    def communicator(self, name: str, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
        """A communicator that is not connected. `store`: of the generation; `name`: unique in it."""
        ...

    def connect(self, communicator: Any) -> Any:
        """Connect a communicator to all members; returns torch's backend for it. Waits for them, until an abort.

        The backend is ready: a collective launches at once.
        """
        ...

    def is_in_collective(self) -> bool | None:
        """True if the device has begun a collective of the newest generation that has not ended; None: not known.

        Any thread. A worker whose device is in none while others are is behind them, also if its host only waits.
        """
        ...

    def abort(self, communicator: Any) -> None:
        """Abort a communicator. May wait for the device, and for the abort of another one; raises nothing."""
        ...

    def all_to_all(
        self,
        received: torch.Tensor,
        send: torch.Tensor,
        out_sizes: Sequence[int] | None,
        in_sizes: Sequence[int] | None,
        group: Any,
    ) -> None:
        """Exchange flat tensors of the accelerator in the order of the current stream. Sizes are in elements."""
        ...


_newest: list[Accelerator] = []
"""The accelerator in use is the last; the package puts CUDA first."""


def accelerator() -> Accelerator:
    """The accelerator of this process. Any thread."""
    return _newest[-1]


def use(other: Accelerator) -> Callable[[], None]:
    """Put another accelerator in CUDA's place; returns a function that undoes it."""
    _newest.append(other)
    return lambda: _newest.remove(other)


_any_is_available = cache(torch.accelerator.is_available)


def seed_torch(number: int) -> None:
    """As `torch.manual_seed`, which formats a stack trace for each kind of device that is absent: 0.25 ms and more."""
    if _any_is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


def seed_without_a_driver(number: int) -> None:
    """As `seed_torch`, in any process: no driver of GPUs is called, after which forked processes cannot use CUDA."""
    if torch.accelerator.current_accelerator() is None:  # torch is built for none
        torch.default_generator.manual_seed(number)
    else:
        torch.manual_seed(number)
