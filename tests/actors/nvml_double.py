"""A double of NVML's Python module: GPUs with counters that a test sets, and events that it sends."""

from __future__ import annotations

import queue
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


class NVMLError_Timeout(Exception):  # noqa: N801 - its name in the module
    pass


class NVMLError_NotSupported(Exception):  # noqa: N801
    pass


@dataclass
class Gpu:
    """One GPU. A counter of None: it is not supported."""

    uuid: str
    memory_errors: int | None = 0
    slowdown: int = 0
    degrees: int = 40
    used: int = 3 << 30
    busy: int = 75
    has_events: bool = True


class NvmlDouble:
    """The functions of the module that are called, for these GPUs."""

    def __init__(self, *gpus: Gpu) -> None:
        self.gpus = {gpu.uuid: gpu for gpu in gpus}
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.registered: list[tuple[str, int]] = []

    def send(self, gpu: Gpu, xid: int) -> None:
        """An Xid of a GPU."""
        self._events.put(SimpleNamespace(device=gpu, eventType=0x8, eventData=xid))

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:  # noqa: N802
        if uuid not in self.gpus:
            raise NVMLError_NotSupported("Not Found")
        return self.gpus[uuid]

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> bytes:  # noqa: N802
        return gpu.uuid.encode()

    def nvmlEventSetCreate(self) -> str:  # noqa: N802
        return "events"

    def nvmlDeviceRegisterEvents(self, gpu: Gpu, kinds: int, events: str) -> None:  # noqa: N802
        if not gpu.has_events:
            raise NVMLError_NotSupported("Not Supported")
        self.registered.append((gpu.uuid, kinds))

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> Any:  # noqa: N802
        try:
            return self._events.get(timeout=timeout_ms / 1000)
        except queue.Empty:
            raise NVMLError_Timeout("Timeout") from None

    def nvmlDeviceGetTotalEccErrors(self, gpu: Gpu, kind: int, counter: int) -> int:  # noqa: N802
        assert (kind, counter) == (1, 0)
        if gpu.memory_errors is None:
            raise NVMLError_NotSupported("Not Supported")
        return gpu.memory_errors

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: Gpu) -> int:  # noqa: N802
        return gpu.slowdown

    def nvmlDeviceGetTemperature(self, gpu: Gpu, sensor: int) -> int:  # noqa: N802
        return gpu.degrees

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> Any:  # noqa: N802
        return SimpleNamespace(used=gpu.used)

    def nvmlDeviceGetUtilizationRates(self, gpu: Gpu) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=gpu.busy)
