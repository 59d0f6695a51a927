"""An accelerator whose tensors lie in host memory: streams and events that a test lets run and finish."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from raysharded.actors.device.cuda import Cuda


class HostEvent:
    """An event that is reached once the test lets it: at once, unless `reached` is cleared."""

    def __init__(self, reached: threading.Event) -> None:
        self._reached = reached

    def query(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._reached.wait()


class HostStream:
    """A stream whose work is done when it is launched."""

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass


class HostAccelerator(Cuda):
    """One device in host memory. All tensors on the CPU count as the device's; communicators are still NCCL's."""

    device_type = "cpu"
    backend = "gloo"
    backend_type = dist.ProcessGroup.BackendType.GLOO

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()
        """Clear it, and no event is reached."""
        self.reached.set()
        self.pinned_bytes: list[int] = []
        self._stream = HostStream()

    def is_available(self) -> bool:
        return True

    def why_unusable(self) -> str:
        return ""

    def names(self) -> list[str]:
        return ["host memory"]

    def free_bytes(self) -> tuple[int, ...]:
        return (1 << 30,)

    def library_version(self) -> str:
        return "0"

    def enter_thread(self) -> None:
        pass

    def select(self, assigned: Sequence[str]) -> torch.device:
        return torch.device("cpu")

    def current(self) -> torch.device:
        return torch.device("cpu")

    def has(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def identity(self, device: torch.device) -> str:
        return "GPU 0"

    def facts(self, device: torch.device) -> Mapping[str, str]:  # type: ignore[override]
        return {"gpu": "host memory"}

    def complaints(self, device: torch.device) -> tuple[str, ...]:
        return ()

    def use(self, device: torch.device) -> dict[str, float]:
        return {}

    def pinned(self, size_bytes: int) -> torch.Tensor:
        self.pinned_bytes.append(size_bytes)
        return torch.empty(size_bytes, dtype=torch.uint8)

    def drain(self, device: torch.device) -> None:
        self.reached.wait()

    def release_freed_memory(self) -> None:
        pass

    def new_stream(self, device: torch.device) -> Any:
        return HostStream()

    def current_stream(self, device: torch.device) -> Any:
        return self._stream

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def record(self, stream: Any) -> Any:
        return HostEvent(self.reached)

    def keep_for_current_stream(self, tensor: torch.Tensor) -> None:
        pass
