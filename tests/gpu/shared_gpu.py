"""Workers that share one GPU: CUDA for everything but their communicators, which gloo carries through host memory.

NCCL refuses two workers on one GPU. The streams, kernels, allocator and threads are real. With
`RAYSHARDED_REHEARSE_GPU_TESTS=1` the double of an accelerator takes the GPU's place, so that the tests themselves can
be tried on a CPU. It proves nothing about a GPU.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raysharded.actors.device import accelerator
from raysharded.actors.device.cuda import Cuda
from raysharded.actors.device.cuda_presence import cuda_facts, why_unusable
from tests.actors.device.communicator_double import CommunicatorDouble, DoubleAccelerator

REHEARSES = bool(os.environ.get("RAYSHARDED_REHEARSE_GPU_TESTS"))
"""True if the tests run on the double."""


def needs(gpus: int) -> list[pytest.MarkDecorator]:
    """Marks of tests that need so many GPUs; without them they are skipped, with the reason."""
    if REHEARSES:
        return [pytest.mark.gpu, pytest.mark.procs]
    found = cuda_facts()
    missing = why_unusable(found) or ("" if found.number >= gpus else f"{found.number} of {gpus} GPUs are here")
    return [pytest.mark.gpu, pytest.mark.procs, pytest.mark.skipif(bool(missing), reason=missing)]


class SharedGpu(Cuda):
    """The GPU of this process, with communicators of gloo."""

    backend = "gloo"
    backend_type = dist.ProcessGroup.BackendType.GLOO

    def __init__(self) -> None:
        super().__init__()
        self.live: list[CommunicatorDouble] = []

    def note(self, call: str) -> None:
        """Called at the beginning of each call of a communicator."""

    def blocks(self, call: str) -> bool:
        return False

    def communicator(self, name: str, store: Any, rank: int, size: int, timeout: Any) -> Any:
        return CommunicatorDouble(name, store, rank, size, self)

    def connect(self, communicator: Any) -> Any:
        return super().connect(communicator).backend


class Sanitized(SharedGpu):
    """Work of each thread of the engine is checked by torch's sanitizer, which raises at the first race."""

    def __init__(self, notes: Path) -> None:
        super().__init__()
        self._notes, self._entered = notes, threading.local()
        self._mode: Any = None

    def enter_thread(self) -> None:
        super().enter_thread()
        if not self._is_selected or getattr(self._entered, "is_watched", False):
            return
        if self._mode is None:
            from torch.cuda._sanitizer import CUDASanitizerDispatchMode

            self._mode = CUDASanitizerDispatchMode()
        self._mode.__enter__()
        self._entered.is_watched = True
        with self._notes.open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {threading.current_thread().name}\n")


class Measured(SharedGpu):
    """The use of the GPU in each step's entry has the bytes of the worker's host memory, too."""

    def use(self, device: torch.device) -> dict[str, float]:
        return super().use(device) | {"host_bytes": float(host_bytes())}


class MeasuredDouble(DoubleAccelerator):
    """As `Measured`, in a rehearsal."""

    def use(self, device: torch.device) -> dict[str, float]:
        return {"tensor_bytes": 0.0, "reserved_bytes": 0.0, "host_bytes": float(host_bytes())}


def host_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def on_shared_gpu() -> None:
    """In a worker's process: compute on the GPU that all workers share."""
    accelerator.use(DoubleAccelerator() if REHEARSES else SharedGpu())


def on_measured_gpu() -> None:
    """In a worker's process: as `on_shared_gpu`, with the worker's host memory in each step's entry."""
    accelerator.use(MeasuredDouble() if REHEARSES else Measured())


def on_sanitized_gpu(notes: Path) -> None:
    """In a worker's process: as `on_shared_gpu`, with torch's sanitizer."""
    accelerator.use(Sanitized(notes))


def is_first(marker: Path) -> bool:
    """True for the first caller of all processes."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def megabytes(use: Mapping[str, float]) -> str:
    """The use of a device, for people."""
    return ", ".join(f"{name} {value / 2**20:.0f} MB" for name, value in sorted(use.items()) if name.endswith("bytes"))
