"""Reasons that this process cannot use a GPU for training, each with the way out."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

_DRIVER = "libcuda.so.1"
_MIG = "MIG"
_HIDING = ("", "-1", "none", "void", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that show no GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaFacts:
    """The facts that decide whether a process can use a GPU."""

    torch: str
    """Version of torch."""
    built_for: str
    """Version of CUDA that torch was built for; empty if for none."""
    driver: int
    """Newest CUDA that the driver supports, as 1000 times its major plus 10 times its minor version; 0: no driver."""
    visible: str | None
    """CUDA_VISIBLE_DEVICES."""
    number: int = 0
    """Number of GPUs that torch sees."""

    @property
    def driver_suffices(self) -> bool:
        """Whether torch can run on the driver: one of CUDA's major versions runs all that was built for that version
        (https://docs.nvidia.com/deploy/cuda-compatibility)."""
        return bool(self.built_for) and self.driver >= 1000 * int(self.built_for.partition(".")[0])


def cuda_facts() -> CudaFacts:
    """The facts of this process."""
    found = CudaFacts(
        torch=torch.__version__,
        built_for=torch.version.cuda or "",
        driver=driver_version(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    return replace(found, number=torch.cuda.device_count()) if found.driver_suffices else found


def driver_version() -> int:
    """Newest CUDA that this machine's driver supports, as in `CudaFacts.driver`; 0 without a driver.

    From the driver's library: torch 2.15 has no name for it.
    """
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return 0
    found = ctypes.c_int(0)
    return found.value if driver.cuDriverGetVersion(ctypes.byref(found)) == 0 else 0


def why_unusable(facts: CudaFacts) -> str:
    """The reason that no GPU can be used, and the way out; empty if one can."""
    if not facts.built_for:
        return (
            f"torch {facts.torch} was built without CUDA. Install a torch for CUDA, the same on all nodes "
            "(https://pytorch.org)"
        )
    if not facts.driver:
        return (
            "this machine has no NVIDIA driver, or its container does not see it. Install one, or start the container "
            "with its GPUs (docker run --gpus all, or nvidia.com/gpu in a pod's limits)"
        )
    if not facts.driver_suffices:
        major, minor = facts.driver // 1000, facts.driver % 1000 // 10
        return (
            f"the NVIDIA driver of this machine is too old: it supports CUDA {major}.{minor}, and torch {facts.torch} "
            f"was built for CUDA {facts.built_for}. Update the driver, or install a torch for CUDA {major}"
        )
    if facts.visible is not None and facts.visible.strip() in _HIDING:
        return f"CUDA_VISIBLE_DEVICES={facts.visible!r} hides all GPUs. Unset it, or leave it to the scheduler"
    if not facts.number:
        shown = "" if facts.visible is None else f" (CUDA_VISIBLE_DEVICES={facts.visible!r})"
        return (
            f"torch finds no GPU{shown}. `nvidia-smi -L` lists those of the machine; one in MIG mode without an "
            "instance is not usable"
        )
    return ""


def why_unfit(names: Sequence[str], index: int, visible: str | None) -> str:
    """The reason that CUDA's GPU of this index cannot have a worker, and the way out; empty if it can.

    `names`: models of the visible GPUs. `visible`: CUDA_VISIBLE_DEVICES.
    """
    shown = [one.strip() for one in visible.split(",")] if visible else []
    if index >= len(names):
        return f"CUDA shows {len(names)} GPUs, and number {index} was assigned. Check CUDA_VISIBLE_DEVICES={visible!r}"
    if _MIG in names[index].split() or (index < len(shown) and shown[index].startswith(f"{_MIG}-")):
        return (
            f"it is a MIG instance ({names[index]}). NCCL does not connect instances of one GPU, and CUDA shows a "
            "process one alone. Turn MIG off for the GPUs of the run (nvidia-smi -mig 0), or train on other nodes"
        )
    return ""
