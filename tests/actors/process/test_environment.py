"""The settings of a worker's process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

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


TRAINS = """
import sys
from raysharded.errors import RayshardedError
from tests.faults.on_fake_nfs import train

if __name__ == "__main__":
    try:
        train(sys.argv[1])
    except RayshardedError as error:
        print(error)
"""


@pytest.mark.procs
def test_a_transport_that_gloo_lacks_is_refused_by_name_before_a_generation_forms(tmp_path: Path) -> None:
    (tmp_path / "trains.py").write_text(TRAINS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_DEVICE_TRANSPORT": "TCP_TLS"}
    command = [sys.executable, str(tmp_path / "trains.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "GLOO_DEVICE_TRANSPORT=TCP_TLS: the gloo of torch " in done.stdout
    assert "nothing between workers is encrypted" in done.stdout
    assert '"kind":"generation"' not in (tmp_path / "run" / "journal" / "00000001.jsonl").read_text()
