"""CUDA and NCCL, as an `Accelerator`. No other module of the library names either."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from raysharded.actors.device.device_waits import waits_for_peers


class Cuda:
    """The GPU of this process."""

    device_type = "cuda"
    backend = "nccl"
    backend_type = dist.ProcessGroup.BackendType.NCCL

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def names(self) -> list[str]:
        if not torch.cuda.is_available():
            return []
        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]

    def free_bytes(self) -> tuple[int, ...]:
        return tuple(int(torch.cuda.mem_get_info(index)[0]) for index in range(torch.cuda.device_count()))

    def library_version(self) -> str:
        if not dist.is_nccl_available():
            return ""
        version = torch.cuda.nccl.version()
        return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)

    def select(self) -> torch.device:
        torch.cuda.set_device(0)  # Ray shows each worker its own GPU as the first
        return torch.device("cuda", 0)

    def current(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def has(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def identity(self, device: torch.device) -> str:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        return " ".join(["GPU", *([shown] if shown.isdigit() else []), *([f"GPU-{uuid}"] if uuid else [])])

    def facts(self, device: torch.device) -> dict[str, str]:
        return {
            "gpu": torch.cuda.get_device_name(device),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "nccl": self.library_version(),
        }

    def pinned(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def new_stream(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.Stream(device)

    def current_stream(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record(self, stream: Any) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event

    def keep_for_current_stream(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def make_compilation_exact(self) -> None:
        from torch._inductor import config as inductor

        inductor.deterministic = True

    @waits_for_peers
    def communicator(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group = dist.ProcessGroupNCCL(store, rank, size, options)
        group.eager_connect_single_device(self.current())
        return group

    def all_to_all(
        self,
        received: torch.Tensor,
        send: torch.Tensor,
        out_sizes: Sequence[int] | None,
        in_sizes: Sequence[int] | None,
        group: Any,
    ) -> None:
        dist.all_to_all_single(received, send, out_sizes, in_sizes, group=group)
