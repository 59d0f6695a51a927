"""`make cuda-names`: whether torch for CUDA has every name, option and signature that the code for GPUs relies on.

No GPU is needed: torch for CUDA can be imported without one. Prints one line for each name, and exits with 1 if one is
missing. `python -m tools.cuda_names` checks the torch of the current environment.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from raysharded.actors.device.cuda import EXACT_SETTINGS, SETTINGS


@dataclass(frozen=True, slots=True)
class Name:
    """A name in torch."""

    path: str
    """Dotted, from the module on."""
    arguments: tuple[str, ...] = ()
    """Arguments that its signature or docstring must name."""


NAMES = (
    # streams, events, memory
    Name("torch.cuda.Stream"),
    Name("torch.cuda.Stream.wait_stream"),
    Name("torch.cuda.Event", ("blocking",)),
    Name("torch.cuda.Event.query"),
    Name("torch.cuda.Event.record"),
    Name("torch.cuda.Event.synchronize"),
    Name("torch.cuda.current_stream", ("device",)),
    Name("torch.cuda.stream", ("stream",)),
    Name("torch.cuda.set_device", ("device",)),
    Name("torch.cuda.synchronize", ("device",)),
    Name("torch.cuda.empty_cache"),
    Name("torch.cuda.mem_get_info", ("device",)),
    Name("torch.cuda.memory_stats", ("device",)),
    Name("torch.cuda.device_count"),
    Name("torch.cuda.get_device_name", ("device",)),
    Name("torch.cuda.get_device_properties", ("device",)),
    Name("torch.cuda.is_available"),
    Name("torch.cuda._CudaDeviceProperties.multi_processor_count"),
    Name("torch.cuda._CudaDeviceProperties.uuid"),
    Name("torch.cuda._CudaDeviceProperties.pci_domain_id"),
    Name("torch.cuda._CudaDeviceProperties.pci_bus_id"),
    Name("torch.cuda._CudaDeviceProperties.pci_device_id"),
    Name("torch.cuda.CUDAGraph"),
    Name("torch._C._cudart.cudaHostRegister"),
    Name("torch._C._cudart.cudaHostUnregister"),
    Name("torch.cuda.cudart"),
    Name("torch.cuda.nccl.version"),
    Name("torch.Tensor.record_stream"),
    # errors
    Name("torch.AcceleratorError"),
    Name("torch.OutOfMemoryError"),
    Name("torch.distributed.DistBackendError"),
    # facts
    Name("torch.version.cuda"),
    Name("torch.backends.cudnn.version"),
    Name("torch.backends.cudnn.allow_tf32"),
    Name("torch.backends.cuda.matmul"),
    Name("torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction"),
    Name("torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction"),
    Name("torch.get_float32_matmul_precision"),
    Name("torch.backends.cuda.preferred_blas_library"),
    Name("torch._inductor.config.deterministic"),
    # communicators
    Name("torch.distributed.is_nccl_available"),
    Name("torch.distributed.ProcessGroup.BackendType.NCCL"),
    Name("torch.distributed.ProcessGroup.bound_device_id"),
    Name("torch.distributed.ProcessGroup._register_backend"),
    Name("torch.distributed.ProcessGroup._set_default_backend"),
    Name("torch.distributed.ProcessGroup._set_group_name"),
    Name("torch.distributed.ProcessGroupNCCL", ("store", "rank", "size", "options")),
    Name("torch.distributed.ProcessGroupNCCL.Options"),
    Name("torch.distributed.ProcessGroupNCCL.Options.config"),
    Name("torch.distributed.ProcessGroupNCCL.Options._timeout"),
    Name("torch.distributed.ProcessGroupNCCL.NCCLConfig.blocking"),
    Name("torch.distributed.ProcessGroupNCCL.eager_connect_single_device"),
    Name("torch.distributed.ProcessGroupNCCL.abort"),
    Name("torch.distributed.ProcessGroupNCCL.alltoall_base"),
    Name("torch.distributed.ProcessGroupNCCL.allreduce"),
    Name("torch.distributed.ProcessGroupNCCL._allgather_base"),
    Name("torch._C._distributed_c10d._dump_nccl_trace_json", ("includeCollectives", "onlyActive")),
)


def found(name: Name) -> str:
    """Reason why a name does not hold in this torch; empty if it does."""
    parts = name.path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            if not hasattr(value, part):
                return f"{type(value).__name__} has no {part}"
            value = getattr(value, part)
        return _lacking(value, name.arguments)
    return "no such module"


def _lacking(value: object, arguments: Iterable[str]) -> str:
    """Arguments that neither the signature nor the docstrings name; empty if all are named."""
    code = getattr(value, "__code__", None)
    text = " ".join(
        [
            *(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()),
            str(getattr(value, "__doc__", "")),
            str(getattr(getattr(value, "__init__", None), "__doc__", "")),
            str(getattr(getattr(value, "__new__", None), "__code__", None) and value.__new__.__code__.co_varnames),
        ]
    )
    missing = [one for one in arguments if not re.search(rf"\b{one}\b", text)]
    return f"no argument {', '.join(missing)}" if missing else ""


def options() -> Iterator[str]:
    """Environment variables, and options of the allocator, that the libraries of torch must contain as text."""
    for name, value in (SETTINGS | EXACT_SETTINGS).items():
        if not name.startswith("CUBLAS"):  # cuBLAS reads it
            yield name
        if name == "PYTORCH_ALLOC_CONF":
            yield from (one.partition(":")[0] for one in value.split(","))


def missing_options() -> list[str]:
    """Options that no library of this torch contains."""
    folder = Path(importlib.import_module("torch").__path__[0]) / "lib"
    left = set(options())
    for library in sorted(folder.glob("libc10*.so")) + sorted(folder.glob("libtorch*.so")):
        if not left:
            break
        content = library.read_bytes()
        left = {one for one in left if one.encode() not in content}
    return sorted(left)


def main() -> int:
    """Print what was found; 1 if something is missing."""
    print(f"torch {importlib.metadata.version('torch')}")
    problems = {name.path: found(name) for name in NAMES}
    lacking = missing_options()
    problems |= {one: "in no library of torch" if one in lacking else "" for one in options()}
    for path, problem in problems.items():
        print(f"{'missing' if problem else 'there':8} {path}{f': {problem}' if problem else ''}")
    count = sum(not problem for problem in problems.values())
    print(f"{count} of {len(problems)} are there")
    return int(count < len(problems))


if __name__ == "__main__":
    sys.exit(main())
