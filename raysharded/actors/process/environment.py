"""Facts that a worker's bits depend on, settings that make them reproducible, and where the process runs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import sys
import time
from dataclasses import replace
from functools import partial
from importlib import metadata

import torch
import torch.distributed as dist

from raysharded import numerics
from raysharded.actors.device.accelerator import accelerator
from raysharded.actors.device.device_errors import drain, warm_up
from raysharded.actors.process.os_processes import start_ticks
from raysharded.actors.step import recomputation
from raysharded.actors.task_calls import unsupported_features
from raysharded.actors.telemetry import device_use
from raysharded.config import EngineConfig
from raysharded.data.loader import MicrobatchLoader
from raysharded.data.sources import Sources
from raysharded.errors import ConfigError
from raysharded.protocol.descriptors import left, raise_limit
from raysharded.protocol.job import Job
from raysharded.protocol.messages import WorkerInfo

_KEEPING = ((-3, 32 << 20), (-1, (1 << 31) - 1), (-2, 128 << 20))
"""Parameters of mallopt: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_TOP_PAD in bytes."""
_TRANSPORT = "GLOO_DEVICE_TRANSPORT"
_MALLOC_CHOICES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")


def prepare_torch(config: EngineConfig, num_threads: int, *, use_gpu: bool) -> torch.device:
    """Configure a worker's process, once, before anything is computed; returns the device to compute on."""
    exact = config.reduction == "exact"
    raise_limit()
    if use_gpu:
        accelerator().prepare_environment(exact=exact)
    use_threads(num_threads)
    recomputation.install()
    unsupported_features.install()
    if exact:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # would fill all
        torch.backends.cudnn.benchmark = False
    if not use_gpu:
        keep_freed_memory()
        return torch.device("cpu")
    return accelerator().select(assigned_gpus())


def prepare_worker(job: Job) -> tuple[torch.device, ConfigError | None]:
    """As `prepare_torch`; also its error, which `Worker.ready` raises. Ray would turn a constructor's into a text."""
    try:
        device = prepare_torch(job.engine, job.num_threads, use_gpu=job.use_gpu)
        if job.use_gpu:
            device_use.begin(device)
        return device, None
    except ConfigError as error:
        return torch.device("cpu"), error


def gpu_of(device: torch.device) -> str:
    """Number and UUID of a GPU on its machine, as far as they are known; empty for a CPU."""
    return accelerator().identity(device) if accelerator().has(device) else ""


def keep_freed_memory() -> None:
    """Let glibc keep up to 2 GB of freed memory for new tensors, unless the environment configures malloc.

    By default glibc returns memory to the system many times in a step, and page faults bring it back one by one. See
    mallopt(3). Blocks of more than 32 MB, the highest threshold allowed, are still returned at once.
    """
    chosen = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        name in os.environ for name in _MALLOC_CHOICES
    )
    mallopt = None if chosen else getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries lack it
    if mallopt is not None:
        for parameter, value in _KEEPING:
            mallopt(parameter, value)


def use_threads(num_threads: int) -> None:
    """Set the number of threads for the calling thread: OpenMP keeps it per thread, and CUDA the current device."""
    torch.set_num_threads(num_threads)
    accelerator().enter_thread()


def sources_of(job: Job, *, collates_later: bool) -> Sources:
    """The run's data as this worker reads them. Raises TaskError for data that cannot be pickled.

    The process that reads them compiles nothing, and has no GPU.
    """
    return Sources(
        job.data,
        job.evaluation,
        job.batch,
        job.engine,
        partial(prepare_torch, replace(job.engine, compile=False), job.num_threads, use_gpu=False),
        collate=job.task.collate,
        collates_later=collates_later,
        patience_s=job.read_patience_s,
    )


def arithmetic(device: torch.device, num_threads: int) -> dict[str, str]:
    """Facts that must be equal on all workers for equal bits, including every rule that this version computes under."""
    facts = {"torch": torch.__version__, "device": device.type, numerics.KEY: numerics.listed()}
    if accelerator().has(device):
        facts |= accelerator().facts(device)
        facts |= {"threads": str(num_threads), "cublas": _installed_version("nvidia-cublas")}
    else:
        facts |= {
            "machine": platform.machine(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "threads": str(num_threads),
        }
    return facts


def _installed_version(prefix: str) -> str:
    """Versions of packages whose names begin with `prefix` (CUDA's libraries end with its major version), or empty."""
    found = {d.metadata["Name"]: d.version for d in metadata.distributions() if d.metadata["Name"].startswith(prefix)}
    return ",".join(f"{name} {version}" for name, version in sorted(found.items()))


def _refuse_transport() -> None:
    """Raise ConfigError if the environment selects a transport that gloo lacks here, as the wheels lack TLS."""
    chosen = os.environ.get(_TRANSPORT)
    if not chosen:
        return
    try:
        dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)
    except RuntimeError as error:
        raise ConfigError(
            f"{_TRANSPORT}={chosen}: the gloo of torch {torch.__version__} does not have this transport ({error}). "
            "Unset it for every worker: then nothing between workers is encrypted, so use a private network."
        ) from None


def assigned_gpus() -> list[str]:
    """Ids of the GPUs that Ray has assigned to this process; empty outside Ray."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return []
    return [str(one) for one in ray.get_runtime_context().get_accelerator_ids().get("GPU", ())]


def node_id() -> str:
    """Id (hex) of the Ray node that this process runs on; outside Ray the host's name."""
    ray = sys.modules.get("ray")  # where Ray matters it is loaded already; a plain process must not wait for that
    if ray is None or not ray.is_initialized():
        return platform.node()
    return str(ray.get_runtime_context().get_node_id())


def warm_up_gpu(device: torch.device, config: EngineConfig) -> None:
    """Let a worker's GPU load its libraries before others wait for this worker. Call it in the thread that computes."""
    warm_up(device, getattr(torch, str(config.param_dtype or "float32")))


def facts_of(device: torch.device, num_threads: int, data: MicrobatchLoader) -> WorkerInfo:
    """Facts about this process for the driver. `data`: the training data in this process.

    Raises ConfigError if gloo lacks the transport that the environment selects.
    """
    _refuse_transport()
    return WorkerInfo(
        pid=os.getpid(),
        node=platform.node(),
        arithmetic=arithmetic(device, num_threads),
        num_samples=data.num_samples,
        samples_per_block=data.samples_per_block,
        mixture=data.order_text,
        contents=data.contents,
        node_id=node_id(),
        started=start_ticks(os.getpid()) or 0,
        start_cpu_s=time.process_time(),
        device=gpu_of(device),
        open_files=left(),
    )


def free_memory(device: torch.device, *, twice: bool) -> None:
    """Free what cycles of references keep alive, and what the device has cached, once the device has done all work.

    Call it after communicators were aborted, and before anything is allocated for the next generation. `twice`: after
    an aborted forward or backward. Its autograd graph refers to older parameters in ways that Python's collector does
    not follow: the first pass frees the graph alone.
    """
    is_drained = drain(device)
    for _ in range(1 + twice):
        gc.collect()
    if is_drained and accelerator().has(device):
        with contextlib.suppress(RuntimeError):  # of a device that fails: `require_device` finds it
            accelerator().release_freed_memory()
