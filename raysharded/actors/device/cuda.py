"""CUDA and NCCL, as an `Accelerator`. No other module of the library names either."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from raysharded.actors.device.cuda_presence import cuda_facts, driver_version, why_unfit, why_unusable
from raysharded.actors.device.device_errors import wait_for_freed_memory
from raysharded.actors.device.device_waits import wait_for, waits_for_peers
from raysharded.actors.device.host_pages import large_pages, pci_name, prefer_node_of
from raysharded.actors.gpu_health import GpuHealth
from raysharded.errors import ConfigError

SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "30",
    "TORCH_NCCL_ENABLE_TIMING": "1",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "PYTORCH_ALLOC_CONF": (
        "expandable_segments:True,pinned_max_round_threshold_mb:64,pinned_max_cached_size_mb:64,"
        "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
    ),
}
"""NCCL reports errors and ends no process, and connects within 30 s; its flight recorder keeps the newest collectives,
and knows which of them the GPU has begun.
Memory: segments grow, and host memory of more than 64 MB is not rounded up to a power of two, and is returned. Eight
threads lock its pages."""
_OF_THE_ENVIRONMENT = ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT")
_USUAL_BLAS = ("Default", "Cublas")
_OF_USERS = ("NCCL_", "TORCH_NCCL_", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS")
"""Beginnings of names of further settings that change how a run computes or communicates."""
EXACT_SETTINGS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Reproducible cuBLAS."""
_LARGE = 64 << 20
"""Bytes from which page-locked memory is in large pages, beside torch's allocator."""
_PORTABLE = 1
"""`cudaHostRegisterPortable`: the memory is page-locked for every context."""
_log = logging.getLogger("raysharded.worker")


class Cuda:
    """The GPU of this process."""

    device_type = "cuda"
    backend = "nccl"
    backend_type = dist.ProcessGroup.BackendType.NCCL

    def __init__(self) -> None:
        self._index, self._is_selected = 0, False
        self._kept: dict[str, str] = {}
        """Name -> a setting of the environment that was there before."""
        self._health: GpuHealth | None = None
        self._name = ""
        """The selected GPU's identity."""
        self._connected_ns = 0
        """Time at which the newest communicator was made, by the wall clock."""

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def why_unusable(self) -> str:
        return why_unusable(cuda_facts())

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

    def prepare_environment(self, *, exact: bool) -> None:
        for name, value in (SETTINGS | EXACT_SETTINGS if exact else SETTINGS).items():
            if name == "PYTORCH_ALLOC_CONF" and "PYTORCH_CUDA_ALLOC_CONF" in os.environ:
                continue
            if os.environ.setdefault(name, value) != value:
                self._kept[name] = f"{name}={os.environ[name]} (raysharded's own value is {value})"
        for name in sorted(os.environ):
            if name.startswith(_OF_USERS) and name not in SETTINGS | EXACT_SETTINGS:
                self._kept[name] = f"{name}={os.environ[name]}"
        if os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] != "0":
            raise ConfigError(
                f"TORCH_NCCL_ASYNC_ERROR_HANDLING={os.environ['TORCH_NCCL_ASYNC_ERROR_HANDLING']}: torch would end "
                "the survivors of a lost worker. Unset it for every worker: raysharded reports errors itself."
            )

    def kept_settings(self) -> tuple[str, ...]:
        return tuple(self._kept.values())

    def select(self, assigned: Sequence[str]) -> torch.device:
        if missing := self.why_unusable():
            raise ConfigError(f"ScalingConfig(use_gpu=True): {missing}.")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        index = index_of(assigned, visible)
        if unfit := why_unfit(self.names(), index, visible):
            raise ConfigError(f"ScalingConfig(use_gpu=True): a worker cannot use the GPU that it was given: {unfit}.")
        self._index, self._is_selected = index, True
        self.enter_thread()
        wait_for_freed_memory(lambda: torch.cuda.mem_get_info(index))
        prefer_node_of(pci_of(torch.cuda.get_device_properties(self._index)))
        self._health, self._name = GpuHealth(), self.identity(self.current())
        self._health.watch(self._name)
        return self.current()

    def enter_thread(self) -> None:
        if self._is_selected:
            torch.cuda.set_device(self._index)

    def current(self) -> torch.device:
        return torch.device("cuda", self._index)

    def has(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def identity(self, device: torch.device) -> str:
        shown = entry_of(device.index or 0, os.environ.get("CUDA_VISIBLE_DEVICES"))
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        return " ".join(["GPU", *([shown] if shown.isdigit() else []), *([f"GPU-{uuid}"] if uuid else [])])

    def facts(self, device: torch.device) -> dict[str, str]:
        return {
            "gpu": torch.cuda.get_device_name(device),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "nccl": self.library_version(),
            "driver": str(driver_version()),
            "multiprocessors": str(torch.cuda.get_device_properties(device).multi_processor_count),
        } | arithmetic_settings()

    def complaints(self, device: torch.device) -> tuple[str, ...]:
        return () if self._health is None else self._health.report(self._name).complaints

    def use(self, device: torch.device) -> dict[str, float]:
        """Also the bytes of torch's tensors, those that its allocator holds, and the most of tensors at a time."""
        of_torch = torch.cuda.memory_stats(device)
        found = {
            "tensor_bytes": float(of_torch.get("allocated_bytes.all.current", 0)),
            "peak_tensor_bytes": float(of_torch.get("allocated_bytes.all.peak", 0)),
            "reserved_bytes": float(of_torch.get("reserved_bytes.all.current", 0)),
        }
        return found if self._health is None else found | self._health.use(self._name)

    def pinned(self, size_bytes: int) -> torch.Tensor:
        found = _locked_pages(size_bytes) if size_bytes >= _LARGE else None
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) if found is None else found

    @waits_for_peers
    def drain(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def release_freed_memory(self) -> None:
        torch.cuda.empty_cache()

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

    def forbid_graphs(self, refuse: Callable[[], NoReturn]) -> None:
        def begun(*_: Any, **__: Any) -> NoReturn:
            refuse()

        setattr(torch.cuda.CUDAGraph, "__new__", staticmethod(begun))  # noqa: B010 - also for torch.compile's

    def communicator(self, name: str, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
        self._connected_ns = time.time_ns()
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.config.blocking = 0  # otherwise no other thread can abort it before it is connected
        return dist.ProcessGroupNCCL(PrefixStore(name, store), rank, size, options)

    @waits_for_peers
    def connect(self, communicator: Any) -> Any:
        """Also sums one element, and waits for it.

        A communicator that does not block returns before it is connected. The first collective then waits for that,
        under a mutex that an abort needs, too. The sum is on a separate stream, and so waits for no other work.
        """
        device = self.current()
        communicator.eager_connect_single_device(device)
        stream = self.new_stream(device)
        with self.on(stream):
            element = torch.zeros(1, device=device)
            communicator.allreduce([element]).wait()
            wait_for(self.record(stream))
        return communicator

    def is_in_collective(self) -> bool | None:
        recorded = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
        if recorded is None or not self._is_selected:
            return None
        found = json.loads(recorded(includeCollectives=True, onlyActive=False))
        return is_in_collective(found.get("entries", ()), self._connected_ns)

    def abort(self, communicator: Any) -> None:
        with contextlib.suppress(RuntimeError):  # also those of a device that does not work any more
            communicator.abort()

    def all_to_all(
        self,
        received: torch.Tensor,
        send: torch.Tensor,
        out_sizes: Sequence[int] | None,
        in_sizes: Sequence[int] | None,
        group: Any,
    ) -> None:
        dist.all_to_all_single(received, send, out_sizes, in_sizes, group=group)


def _locked_pages(size_bytes: int) -> torch.Tensor | None:
    """Page-locked memory in large pages, as `Cuda.pinned`; None if CUDA does not lock it."""
    runtime, locked = torch.cuda.cudart(), list[bool]()
    found = large_pages(size_bytes, lambda address: runtime.cudaHostUnregister(address) if locked else None)
    code = int(runtime.cudaHostRegister(found.data_ptr(), size_bytes, _PORTABLE))
    if code == 0:
        locked.append(True)
        return found
    with contextlib.suppress(RuntimeError):  # CUDA keeps the error, and the next launch would raise it
        torch.zeros(1, device="cuda")
    _log.warning("CUDA did not lock %d MiB of host memory (error %d): torch allocates it", size_bytes >> 20, code)
    return None


def is_in_collective(entries: Sequence[Mapping[str, Any]], since_ns: int) -> bool | None:
    """As `Accelerator.is_in_collective`, of the flight recorder's entries from a time on. None if there are none.

    torch's watchdog notes what the GPU has begun and ended, every 100 ms. Entries of aborted communicators never end.
    """
    states = [entry["state"] for entry in entries if entry["time_created_ns"] >= since_ns]
    return "started" in states if states else None


def arithmetic_settings() -> dict[str, str]:
    """Settings of this process that change the bits of products on a GPU.

    Those of the environment, and a preferred library for products, only if they are set: runs without them have none.
    """
    matmul = torch.backends.cuda.matmul
    found = {
        "matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_tf32": str(torch.backends.cudnn.allow_tf32),
        "reduced_precision": f"{matmul.allow_fp16_reduced_precision_reduction}, "
        f"{matmul.allow_bf16_reduced_precision_reduction}",
    }
    preferred = str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2]
    if preferred not in _USUAL_BLAS:
        found["blas"] = preferred
    return found | {name: os.environ[name] for name in _OF_THE_ENVIRONMENT if name in os.environ}


def pci_of(properties: Any) -> str:
    """Name of a GPU in the kernel's list of PCI devices; empty for a torch that does not know it."""
    if not hasattr(properties, "pci_domain_id"):
        return ""
    return pci_name(properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)


def entry_of(index: int, visible: str | None) -> str:
    """The entry of CUDA_VISIBLE_DEVICES for CUDA's index; empty if there is none."""
    shown = [one.strip() for one in visible.split(",")] if visible else []
    return shown[index] if index < len(shown) else ""


def index_of(assigned: Sequence[str], visible: str | None) -> int:
    """CUDA's index of the GPU that a scheduler has assigned, by the ids or UUIDs that it uses.

    `visible`: CUDA_VISIBLE_DEVICES. Usually it has the assigned GPU alone. If the scheduler does not set it, it has all
    GPUs that the node's environment shows, or is not set. Raises ConfigError if it lacks the assigned one.
    """
    if not assigned:
        return 0
    shown = [one.strip() for one in visible.split(",")] if visible else []
    if assigned[0] in shown:
        return shown.index(assigned[0])
    if not shown and assigned[0].isdigit():
        return int(assigned[0])
    raise ConfigError(
        f"the scheduler has assigned GPU {assigned[0]}, and CUDA_VISIBLE_DEVICES is {visible!r}. Set it to a list with "
        "this GPU for all workers of the node, or leave it to the scheduler."
    )
