"""The settings of a worker's process."""

from __future__ import annotations

import os
import subprocess
import sys

SIZE = 30_000_000
PROGRAM = f"""
import ctypes
import torch
from raysharded.actors.process.environment import keep_freed_memory

class Info(ctypes.Structure):  # mallinfo(3)
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

info = ctypes.CDLL(None).mallinfo2
info.restype = Info
keep_freed_memory()
before = info()
tensor = torch.ones({SIZE}, dtype=torch.uint8)
held = info()
del tensor
print(held.hblkhd - before.hblkhd, info().fordblks - held.fordblks)
"""


def of_a_tensor(**environment: str) -> tuple[int, int]:
    """(bytes that the system maps for it alone, bytes that are kept when it is freed)."""
    command = [sys.executable, "-c", PROGRAM]
    usual = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(command, env=usual | environment, capture_output=True, text=True, check=True)
    mapped, kept = map(int, done.stdout.split())
    return mapped, kept


def test_the_memory_of_a_tensor_that_is_freed_is_kept() -> None:
    mapped, kept = of_a_tensor()
    assert mapped == 0
    assert kept > 0.9 * SIZE


def test_who_has_chosen_how_memory_is_kept_has_it_so() -> None:
    mapped, kept = of_a_tensor(MALLOC_MMAP_THRESHOLD_=str(1 << 20))
    assert mapped >= SIZE
    assert kept < 0.1 * SIZE
