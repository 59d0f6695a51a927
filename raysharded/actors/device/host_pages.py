"""Pages of host memory for a GPU: on the memory node next to it, and large ones.

A copy between a GPU and the memory of another socket takes twice as long. The kernel then prefers the GPU's node (NUMA)
for new pages, and takes them elsewhere when that one is full. Threads may run anywhere: which processors a worker may
use is the scheduler's choice.

Page-locked memory is locked page by page: with pages of 2 MiB there are 512 times fewer. Linux gives them to memory
that requests them (`madvise`), unless its administrator has set `transparent_hugepage/enabled` to `never`.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

_DEVICES = Path("/sys/bus/pci/devices")
_NODES = Path("/sys/devices/system/node")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Number of the system call, by processor."""
_PREFERRED = 1
_MOST_NODES = 1024
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_TOUCHING_THREADS = 8


def pci_name(domain: int, bus: int, device: int) -> str:
    """Name of a device in the kernel's list: `0000:17:00.0`."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def node_of(pci: str, devices: Path = _DEVICES, nodes: Path = _NODES) -> int | None:
    """Number of the memory node next to a PCI device; None if it is unknown, or if the machine has one alone."""
    try:
        found = int((devices / pci / "numa_node").read_text())
        several = sum(path.name[4:].isdigit() for path in nodes.glob("node*")) > 1
    except (OSError, ValueError):
        return None
    return found if found >= 0 and several else None


def prefer(node: int) -> bool:
    """Take new pages of the calling thread, and of threads that it starts, from this node if it has some left.

    False if the kernel does not allow it, as in many containers.
    """
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None or not 0 <= node < _MOST_NODES:
        return False
    mask = (ctypes.c_ulong * (_MOST_NODES // _BITS))()
    mask[node // _BITS] = 1 << node % _BITS
    library = ctypes.CDLL(None, use_errno=True)
    return bool(library.syscall(number, _PREFERRED, mask, ctypes.c_ulong(_MOST_NODES)) == 0)


def prefer_node_of(pci: str) -> bool:
    """As `prefer`, for the node next to a PCI device; False if there is nothing to choose."""
    node = node_of(pci)
    return node is not None and prefer(node)


def large_pages(size_bytes: int, on_free: Callable[[int], object]) -> torch.Tensor:
    """New memory as uint8 [size_bytes], zeros, in large pages as far as the kernel has them. Several threads take them.

    `on_free`: called with the memory's address before it is given back.
    """
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    owner = np.frombuffer(memory, np.uint8)
    found = torch.from_numpy(owner)
    weakref.finalize(owner, on_free, found.data_ptr()).atexit = False  # an mmap's own weak references end after it
    with ThreadPoolExecutor(_TOUCHING_THREADS, "pages") as threads:
        parts = found[:: mmap.PAGESIZE].tensor_split(_TOUCHING_THREADS)
        list(threads.map(torch.Tensor.zero_, parts))
    return found
